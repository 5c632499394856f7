"""Checkpoint files that would never be read to their end, and tokenizers whose own patterns never end."""

import ast
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hal_core.errors import InvalidValue, Unavailable
from hal_engine.model import DEFAULT_CHECKPOINT, encoder
from hal_engine.model import tokenizer as tokenizer_module
from hal_engine.model.config import parse_config, read_config
from hal_engine.model.digest import checkpoint_digest
from hal_engine.model.files import check_regular
from hal_engine.model.least import longest_token
from hal_engine.model.loading import _file_entries
from hal_engine.model.patterns import LINEAR
from hal_engine.model.tokenizer import Tokenizer, TooLong
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.key_file import record_keys
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hal.cli import main

from .test_streaming import FEW, TEXTS, tokenizer_of
from .tokenizers_of_kinds import KINDS

ROOT = Path(__file__).parents[2]


def made(checkpoints, **parts):
    backend = Backend(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend, parse_config(checkpoints.llama), source="some/tokenizer.json")


def split(pattern):
    return {"pre_tokenizer": pre_tokenizers.Split(Regex(pattern), "isolated")}


GROWS = {"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)}


@pytest.mark.parametrize(
    ("parts", "text", "told"),
    [
        (split("(a|aa)+b"), "a" * 60, "fails: Onig: Regex search error: retry-limit-in-match over"),
        (split("a+b"), "a" * 1_000_000, "takes more than 0 s of processor time for a prompt: a regular expression"),
        (GROWS, "a", "takes more than 0 GiB of memory for a prompt: its normalizer makes texts longer"),
    ],
    ids=["gives up", "never ends", "grows"],
)
def test_a_tokenizer_without_an_end_is_refused(checkpoints, monkeypatch, capfd, parts, text, told):
    monkeypatch.setattr(TIMEOUTS, "tokenizer", 0)
    monkeypatch.setattr(TIMEOUTS, "tokenizer_mib", 0)
    monkeypatch.setattr(encoder, "ROOM", 64 << 20)
    monkeypatch.setenv("RUST_BACKTRACE", "1")  # with which a panic takes memory, and waits forever if none is left
    with pytest.raises(InvalidValue, match=r"^some/tokenizer\.json: ") as refused:
        made(checkpoints, **parts).encode(text)
    assert told in str(refused.value)
    assert capfd.readouterr() == ("", "")


MARKS, SPACES = decoders.Replace("▁", " "), decoders.Replace(" ", "  ")
ENDLESS = {
    "grows": (
        [decoders.ByteLevel(), *[SPACES] * 40],
        "decoders[5]: makes a text, with the steps before it, more than 16",
    ),
    "nested": ([decoders.Sequence([SPACES] * 3), *[SPACES] * 2], "decoders[2]: makes a text"),
    "long": ([decoders.Replace("a", "b" * 17)], "decoders[0]: makes a text"),
    "by nothing": ([decoders.Replace("", " ")] * 3, "decoders[2]: makes a text"),
    "suffix": ([decoders.BPEDecoder(suffix="")] * 3, "decoders[2]: makes a text"),
    "delimiter": ([decoders.CTC("", "", True)] * 3, "decoders[2]: makes a text"),
    "regular": (
        [MARKS, decoders.Replace(Regex("(a|aa)+b"), "")],
        "decoders[1].pattern: is a regular expression, which",
    ),
}
"""Steps of a decoder, and the expected report."""


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_decoder_without_an_end_is_refused_when_it_is_loaded(kind, checkpoints):
    steps, told = ENDLESS[kind]
    with pytest.raises(InvalidValue) as refused:
        made(checkpoints, decoder=decoders.Sequence(steps))
    assert str(refused.value).startswith(f"some/tokenizer.json: decoder.{told}")
    assert "(replace one text by another that is not longer, or use another checkpoint)" in str(refused.value)


def test_decoders_of_checkpoints_are_taken(checkpoints):
    """Those of the supported families are in ``tests/model/tokenizers_of_kinds.py``, too."""
    many = [
        MARKS,
        decoders.Replace("Ċ", "\n"),
        decoders.Replace("a", "a "),
        decoders.BPEDecoder(),
        decoders.ByteLevel(),
    ]
    steps = [*many, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.WordPiece()]
    made(checkpoints, decoder=decoders.Sequence([*steps, decoders.Metaspace(), *[MARKS] * 40]))
    made(checkpoints, decoder=SPACES)
    made(checkpoints)


def test_unknown_patterns_run_in_a_process_of_their_own_and_known_ones_here(checkpoints):
    unknown, known = made(checkpoints, **split("a")), made(checkpoints, pre_tokenizer=pre_tokenizers.Whitespace())
    assert unknown.encode_all(["a", "<unk>a", ""]) == [[0], [1, 0], []]
    assert known.encode_all(["a a", "a"]) == [[0, 0], [0]]
    assert [one._process is not None for one in (*unknown._encoders, *known._encoders)] == [True, False, False, False]


@pytest.mark.parametrize("pattern", sorted(LINEAR))
def test_known_patterns_run_here(checkpoints, pattern):
    tokenizer = made(checkpoints, **split(pattern))
    tokenizer.encode("a")
    assert [one._process for one in tokenizer._encoders] == [None, None]


RUNS = [" ", "\n ", "A", "aA", "'s", "\u0301", "A1", "\u3000x", "!", "!\n", "ʰ", "一"]
"""Parts of texts that a pattern reads for long, and then gives back."""


@pytest.fixture
def one_second(monkeypatch):
    """The limit of unknown patterns, a fifth of it: one that takes linear time keeps it in each of :data:`RUNS`, and a
    quadratic one exceeds it twenty times."""
    monkeypatch.setattr(TIMEOUTS, "tokenizer", 1)
    monkeypatch.setattr(TIMEOUTS, "tokenizer_mib", 0)


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize("pattern", sorted(LINEAR))
def test_a_known_pattern_takes_linear_time(checkpoints, monkeypatch, pattern):
    monkeypatch.setattr(tokenizer_module, "HERE", 0)
    tokenizer = made(checkpoints, **split(pattern))
    for run in RUNS:
        assert tokenizer.encode(run * ((1 << 17) // len(run)) + "x")


@pytest.mark.usefixtures("one_second")
def test_that_limit_finds_a_quadratic_pattern(checkpoints):
    with pytest.raises(InvalidValue, match=r"takes more than 1 s of processor time for a prompt"):
        made(checkpoints, **split(r"\s+$")).encode(" " * (1 << 17) + "x")


@pytest.mark.parametrize(
    "parts",
    [
        split(r"\p{L}+|a"),
        {"normalizer": normalizers.Replace(Regex("a"), "b")},
        {"normalizer": normalizers.Replace("a", "b" * 17)},
        {"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 5)},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")] * 17)},
        {"pre_tokenizer": pre_tokenizers.Split("a" * 17, "isolated")},
        {"normalizer": normalizers.Replace(Regex(r"\p{N}{1,3}"), "b")},
    ],
)
def test_other_patterns_and_texts_that_grow_are_unknown(checkpoints, parts):
    assert not made(checkpoints, **parts)._is_known


def test_a_long_text_is_encoded_elsewhere_and_holds_no_short_one_up(checkpoints, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "HERE", 4)
    monkeypatch.setattr(tokenizer_module, "SHORT", 8)
    tokenizer = made(checkpoints, pre_tokenizer=pre_tokenizers.Whitespace())
    short, long = tokenizer._encoders
    with long._lock:  # as while it encodes
        assert tokenizer.encode_all(["a", "a a a"]) == [[0], [0] * 3]
    assert tokenizer.encode("a " * 8) == [0] * 8
    assert (short._process is not None, long._process is not None) == (True, True)


def test_texts_keep_their_order_whoever_encodes_them(checkpoints, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "HERE", 1)
    monkeypatch.setattr(tokenizer_module, "SHORT", 3)
    monkeypatch.setattr(tokenizer_module, "_BATCH", 2)
    tokenizer = made(checkpoints, pre_tokenizer=pre_tokenizers.Whitespace())
    texts = ["a", "a a", "a a a a", "", "b", "b a", "a a a"]
    assert tokenizer.encode_all(texts) == [[0], [0, 0], [0] * 4, [], [1], [1, 0], [0] * 3]


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}", " "])
def test_a_lone_surrogate_is_no_text_wherever_it_is_encoded(checkpoints, pattern):
    with pytest.raises(InvalidValue, match="prompt: is no UTF-8 text"):
        made(checkpoints, **split(pattern)).encode_all(["a", "\ud800"])


def test_a_process_that_was_ended_is_started_anew(checkpoints):
    tokenizer = made(checkpoints, **split(" "))
    assert tokenizer.encode("a") == [0]
    first = tokenizer._encoders[0]._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert tokenizer.encode("a") == [0]
    tokenizer.close()
    assert tokenizer.encode("a") == [0]
    assert tokenizer._encoders[0]._process.pid != first.pid


def computing(pid):
    """Wait until a process has computed for half a second: ten times what it takes to start."""
    used = 0
    while used < os.sysconf("SC_CLK_TCK") // 2:
        used = int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11])


def test_closing_ends_a_text_that_is_being_encoded(checkpoints):
    tokenizer, raised = made(checkpoints, **split("a+b")), []

    def encode():
        with pytest.raises(Unavailable, match="the tokenizer's process was closed"):
            tokenizer.encode("a" * 1_000_000)
        raised.append(True)

    thread = threading.Thread(target=encode)
    thread.start()
    while tokenizer._encoders[1]._process is None:
        pass
    computing(tokenizer._encoders[1]._process.pid)
    tokenizer.close()
    thread.join(20.0)
    assert raised == [True]


ORPHAN = """
import os, signal, sys, threading
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from hal_engine.model.encoder import Encoder
backend = Tokenizer(models.WordLevel({"a": 0}, "a"))
backend.pre_tokenizer = pre_tokenizers.Split(Regex("a+b"), "isolated")
encoder = Encoder(backend.to_str().encode(), "tokenizer.json", trusted=False)
encoder.encode([b"a"], True)
print(encoder._process.pid, flush=True)
encoder.encode([b"a" * 4_000_000], True)
"""


def test_a_busy_process_ends_with_its_parent(monkeypatch):
    monkeypatch.setenv("HAL_SECONDS_TOKENIZER", "3600")  # its limit does not end it
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    child = os.pidfd_open(pid)
    computing(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([child], [], [], 20.0)[0], "it outlives its parent"
    os.close(child)


def test_a_fork_of_this_process_starts_its_own(checkpoints):
    tokenizer = made(checkpoints, **split(" "))
    assert tokenizer.encode("a") == [0]
    pid = tokenizer._encoders[0]._process.pid
    if (child := os.fork()) == 0:
        alright = tokenizer.encode("a") == [0] and tokenizer._encoders[0]._process.pid != pid
        os._exit(not alright)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokenizer.encode("a") == [0]
    assert tokenizer._encoders[0]._process.pid == pid


def test_no_module_of_the_product_forks():
    """A child that does not call exec keeps every descriptor, as that of a listening port."""
    folders = [
        ROOT / "hal",
        ROOT / "core/src",
        *ROOT.glob("engine/src"),
        *ROOT.glob("plugins/*/src"),
        *ROOT.glob("adapters/*/src"),
        *ROOT.glob("runners/*/src"),
    ]
    forks = []
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", getattr(node, "id", getattr(node, "name", None)))
            if name in ("fork", "forkpty") or (
                isinstance(node, ast.Import | ast.ImportFrom)
                and "multiprocessing" in (getattr(node, "module", None) or "", *(one.name for one in node.names))
            ):
                forks.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert forks == []


@FEW
@given(text=TEXTS, times=st.integers(1, 50))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(text, times):
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        tokens = len(tokenizer.encode(text * times, add_special_tokens=False))
        assert tokens * tokenizer._longest >= len((text * times).encode()) * bool(tokenizer._longest)


def test_a_text_whose_bytes_cannot_fit_is_refused_by_its_length():
    tokenizer = tokenizer_of("byte level")
    tokenizer.check_length("a" * 25, 6)  # five tokens of five bytes, as far as is known, and one of the answer
    with pytest.raises(
        TooLong, match=r"26 characters are at least 6 tokens, and 6 fit with the answer's \(shorten the"
    ):
        tokenizer.check_length("a" * 26, 6)
    tokenizer_of("word pieces").check_length("a" * 1000, 2)


def test_a_tokenizer_that_shortens_has_no_bound():
    def longest(kind="byte level", **parts):
        backend = KINDS[kind]()
        for name, part in parts.items():
            setattr(backend, name, part)
        return longest_token(backend)

    assert longest() == len("<unk>")
    assert longest("llama-2") == len("▁stop".encode())
    assert longest(normalizer=normalizers.Prepend("a"))
    assert longest(normalizer=normalizers.Replace("a", "bb"))
    for normalizer in (normalizers.Replace("ab", "b"), normalizers.NFC(), normalizers.Strip(), normalizers.Lowercase()):
        assert not longest(normalizer=normalizer)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert longest(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "isolated"), level]))
    assert not longest(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), level]))
    assert not longest(pre_tokenizer=pre_tokenizers.WhitespaceSplit())
    assert not longest("no decoder")  # the letters of an unknown word are one token
    words = {"<unk>": 0, "a": 1}
    assert longest_token(Backend(models.BPE(vocab=words, merges=[], unk_token="<unk>"))) == len("<unk>")
    assert not longest_token(Backend(models.BPE(vocab=words, merges=[], unk_token="<unk>", fuse_unk=True)))
    assert not longest_token(Backend(models.BPE(vocab=words, merges=[])))  # unknown characters are dropped
    backend = KINDS["byte level"]()
    backend.add_tokens([AddedToken("<m>", lstrip=True)])
    assert not longest_token(backend)


def test_the_command_says_it_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(TIMEOUTS, "tokenizer", 0)
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, model)
    content = json.loads((model / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a|aa)+b"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--device", "cpu", "--model", str(model), "--prompt", "a" * 60])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"hal: error: {model}/tokenizer.json: fails: Onig: ")


def test_the_command_says_of_a_decoder_that_grows(tmp_path, capfd):
    model = tmp_path / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, model)
    content = json.loads((model / "tokenizer.json").read_text())
    doubling = {"type": "Replace", "pattern": {"String": " "}, "content": "  "}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], *[doubling] * 40]}
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--device", "cpu", "--model", str(model), "--prompt", "a"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"hal: error: {model}/tokenizer.json: decoder.decoders[5]: makes a text, ")


READERS = {
    "config.json": lambda folder: read_config(folder),
    "tokenizer.json": lambda folder: Tokenizer.load(folder, read_config(DEFAULT_CHECKPOINT)),
    "model.safetensors": lambda folder: _file_entries(folder / "model.safetensors"),
    "other.safetensors": checkpoint_digest,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    ended = []

    def read():
        with pytest.raises(InvalidValue, match=f"{name}: is not a regular file"):
            READERS[name](tmp_path)
        ended.append(name)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20.0)
    assert ended == [name], "it waits for somebody to write into the pipe"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_that_does_not_fit_into_memory_is_named(checkpoints, tmp_path, monkeypatch, name):
    def refuse(path):
        raise MemoryError

    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 1 << 40)  # sparse
    monkeypatch.setattr(Path, "read_bytes", refuse)  # as Python does, where the kernel grants no such memory
    with pytest.raises(InvalidValue) as refused:
        (read_config(tmp_path) if name == "config.json" else Tokenizer.load(tmp_path, parse_config(checkpoints.llama)))
    told = "its 1099511627776 bytes do not fit into memory (restore the file)"
    assert str(refused.value) == f"{tmp_path / name}: {told}"


def test_a_long_line_of_a_file_is_named_by_its_length(tmp_path, capfd):
    (tmp_path / "prompts").write_text(f"a\n{'a' * 2_000_000}\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--device", "cpu", "--prompts", str(tmp_path / "prompts")])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert re.fullmatch(
        r"hal: error: prompt 2 of 2: 2000000 characters are at least \d+ tokens, and 512 fit with the answer's "
        r"\(shorten the prompt\)",
        line,
    )


def test_a_pipe_in_place_of_a_key_is_refused_and_links_are_followed(tmp_path):
    os.mkfifo(tmp_path / "key")
    with pytest.raises(InvalidValue, match=r"--key: .* is no regular file"):
        record_keys("tcp://h:1", tmp_path / "key", make=True)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    check_regular(tmp_path / "link")
    check_regular(tmp_path / "missing")


def test_a_size_too_large_for_its_field_is_told_as_that(checkpoints):
    with pytest.raises(InvalidValue, match=r"hidden_size: 4294967296: must be a whole number from 1 to 2147483647"):
        parse_config(checkpoints.llama | {"hidden_size": 2**32})
