"""``hal run --split`` in separate processes: its output, and its refusals."""

import contextlib
import json

import pytest
from hal_core.slots.admission import draw_seed
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer

from hal.cli import main
from tests.commands import TWO_PROMPTS as JOB
from tests.commands import environment, left_in, start
from tests.split.carried import CARRIER, FOLDER, calls_in
from tests.split.rows import Own

pytestmark = pytest.mark.long(18)


SPLIT = ("--speculate", "mtp", "--chunk", "3", "--split", "1,1")


@pytest.fixture
def alone(capsys):
    """The output of one process."""
    with contextlib.suppress(SystemExit):
        main(["run", "--device", "cpu", *JOB])
    return capsys.readouterr().out


def test_two_workers_print_what_one_does(alone, capsys, private_folders, monkeypatch, tmp_path):
    """Their ranks are forks of a process that has Paddle already, which takes a fifth of a start's processor time. Keys
    and values are sent by a named transfer, which wraps hal's.
    """
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", lambda size, **_: Own(size))
    with pytest.raises(SystemExit) as ended:
        main(["run", "--device", "cpu", *JOB, *SPLIT, "--transfer", CARRIER])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    compare(alone, out, err)
    calls = calls_in(tmp_path)
    assert calls["send"] == calls["seal"] != calls["reserve"], "one process sends, another one promises"
    assert len(calls["receive"]) == len(calls["describe"]) == len(calls["close"]) == 2


@pytest.mark.conform
def test_the_command_by_itself_prints_the_same_and_leaves_nothing(alone, tmp_path):
    process = start(tmp_path, "run", *JOB, *SPLIT, env=environment(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    compare(alone, out, err)
    assert left_in(tmp_path) == []


def compare(alone, out, err):
    """The same tokens and text, log-probabilities within 1e-4, and the same counts of drafts."""
    lines = [[json.loads(line) for line in text.splitlines()] for text in (alone, out)]
    for one, two in zip(*lines, strict=True):
        assert (one["token_ids"], one["text"], one["device"]) == (two["token_ids"], two["text"], two["device"])
        for mine, its in zip(one["logprobs"], two["logprobs"], strict=True):
            assert its["logprob"] == pytest.approx(mine["logprob"], abs=1e-4)
        counts = two["speculation"]
        assert 0 < counts["accepted"] <= counts["drafted"] <= 4 * 12, counts
    assert "split 1,1" in err


MIX = (
    "--device",
    "sim",
    "--runner",
    "hal_sim.mixing:MixRunner",
    "--seed",
    "3",
    "--temperature=0",
    "--max-tokens",
    "20",
    "--json",
)
PROMPTS = ("def main(", "x = ", "class Reader: takes what comes and shows it to whoever asks")


@pytest.mark.conform
@pytest.mark.parametrize(("overlap", "drafts"), [("on", ()), ("off", ()), ("on", ("--drafts", "3"))])
def test_a_runner_that_says_where_its_blocks_are_may_be_split_too(overlap, drafts, tmp_path, capfd, monkeypatch):
    """Its tokens depend on the content of the blocks, on the device's stream, a step ahead of the host or not."""
    mixing = pytest.importorskip("hal_sim.mixing", reason="paddle-hal-sim is not installed")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    arguments = [*MIX, *(part for prompt in PROMPTS for part in ("--prompt", prompt)), "--chunk", "4", "--slots", "2"]
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments, "--split", "1,1", "--overlap", overlap, *drafts])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, config)
    for prompt, line in zip(PROMPTS, out.splitlines(), strict=True):
        answer = json.loads(line)
        tokens = tokenizer.encode(prompt)
        foretold = mixing.mixed(draw_seed(3, answer["request_id"]), tokens, 20, config.vocab_size)
        assert answer["token_ids"] == foretold[: len(answer["token_ids"])]
        assert answer["finish_reason"] == "length" or answer["token_ids"][-1] in config.eos_token_ids


@pytest.mark.conform
def test_a_runner_that_does_not_is_refused_by_name(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silent.py").write_text(
        "from hal_sim.mixing import MixRunner\n"
        "class Silent(MixRunner):\n"
        "    def __init__(self, setup):\n"
        "        super().__init__(setup)\n"
        "        del self.cache\n"
    )
    pytest.importorskip("hal_sim.mixing", reason="paddle-hal-sim is not installed")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "run",
                "--device",
                "sim",
                "--runner",
                "silent:Silent",
                "--temperature=0",
                "--prompt",
                "a",
                "--split",
                "1,1",
            ]
        )
    assert ended.value.code == 2
    assert "silent:Silent does not describe its keys and values" in capfd.readouterr().err
