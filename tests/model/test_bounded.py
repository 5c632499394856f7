"""Checkpoint files that would never be read to their end, and tokenizers whose own patterns never end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from hal_core.errors import InvalidValue
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hal.cli import main
from hal.model import DEFAULT_CHECKPOINT, bounded
from hal.model.config import parse_config, read_config
from hal.model.digest import checkpoint_digest
from hal.model.files import check_regular
from hal.model.loading import _file_entries
from hal.model.tokenizer import Tokenizer
from hal.timeouts import TIMEOUTS
from hal.transport.key_file import record_keys


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
    monkeypatch.setattr(bounded, "ROOM", 64 << 20)
    monkeypatch.setenv("RUST_BACKTRACE", "1")  # with which a panic takes memory, and waits forever if none is left
    with pytest.raises(InvalidValue, match=r"^some/tokenizer\.json: ") as refused:
        made(checkpoints, **parts).encode(text)
    assert told in str(refused.value)
    assert capfd.readouterr() == ("", "")


ABORTS = """
import os, paddle
from hal.model.bounded import bounded
try:
    bounded(lambda text: os.abort(), ["a"], "some/tokenizer.json")
except ValueError as refused:
    print(refused)
"""


def test_paddle_reports_nothing_of_a_tokenizer_that_aborts():
    pytest.importorskip("paddle")  # its handler of SIGABRT prints a C++ trace to stdout
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", ABORTS], capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("some/tokenizer.json: takes more than 1 GiB of memory for a prompt")
    assert len(ended.stdout.splitlines()) == 1


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


def test_patterns_of_a_file_are_bounded_and_others_cost_nothing(checkpoints, monkeypatch):
    monkeypatch.setattr("hal.model.tokenizer.bounded", lambda call, texts, source: "in a child")
    assert made(checkpoints, **split("a")).encode_all(["a"]) == "in a child"
    assert made(checkpoints, pre_tokenizer=pre_tokenizers.Whitespace()).encode_all(["a a", "a"]) == [[0, 0], [0]]


def test_a_child_gives_what_the_tokenizer_gives_and_raises(checkpoints):
    tokenizer = made(checkpoints, **split(" "))
    assert tokenizer.encode_all(["a", "b", ""]) == [[0], [1], []]
    with pytest.raises(InvalidValue, match="prompt: is no UTF-8 text"):
        tokenizer.encode("\ud800")


HELD_OPEN = """
import os, signal, sys, time
from hal.model.bounded import bounded

fork, held = os.fork, []
def fork_another_first():  # as another thread might, in the middle of the call
    if (other := fork()) == 0:
        time.sleep(600)
        os._exit(0)
    held.append(other)
    return fork()

os.fork = fork_another_first
print(bounded(lambda text: [len(text)], ["abc"], "tokenizer.json"), flush=True)
os.kill(held[0], signal.SIGKILL)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.fork = fork
print(bounded(lambda text: [len(text)], ["abcd"], "tokenizer.json"))
"""


def test_other_children_hold_nothing_up_and_may_be_ignored():
    done = subprocess.run([sys.executable, "-c", HELD_OPEN], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[[3]]\n[[4]]\n"), done.stderr


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
