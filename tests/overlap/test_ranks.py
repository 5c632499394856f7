"""Steps overlap on several ranks too: the engine sends them one step ahead, and continues after a loss.

Ranks run on the sim device as late as possible, with one slot, so that each request enters where one has just ended.
"""

import json
import re
from pathlib import Path

import pytest
from hal_core.slots.admission import draw_seed
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hal_sim.mixing import mixed

from hal.cli import main

from .raising import MARK

pytestmark = [pytest.mark.long(30), pytest.mark.conform]  # four processes import Paddle, and then four more
PROMPTS = ("def main(", "x = ", "class Reader:", "if not")
TOKENS = 10


@pytest.fixture
def run(simulator, capsys, monkeypatch, tmp_path):
    """``hal run`` on two ranks, one step ahead, with a runner of this folder: its status, its answers, and standard
    error. Each answer's tokens are those of its prompt."""
    pytest.importorskip("paddle", reason="its launcher starts the ranks", exc_type=ImportError)
    settings = {"HALSIM_MODE": "2", "HALSIM_STAGED": "0", "HAL_RANKS_TIMEOUT": "20", "XDG_RUNTIME_DIR": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(Path(__file__).parent)
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, config)

    def call(runner, *arguments, drafts=0, prompts=PROMPTS):
        arguments += ("--device", "sim", "--runner", runner, "--tp", "2", "--overlap", "on", "--chunk", "4", "--json")
        arguments += ("--temperature=0", "--max-tokens", str(TOKENS), "--seed", "3", "-v")
        arguments += ("--drafts", str(drafts)) if drafts else ()
        with pytest.raises(SystemExit) as end:
            main(["run", *arguments, *(part for prompt in prompts for part in ("--prompt", prompt))])
        out, err = capsys.readouterr()
        found = [json.loads(line) for line in out.splitlines()]
        assert len(found) == len(prompts), err
        for prompt, answer in zip(prompts, found, strict=True):
            tokens = mixed(draw_seed(3, answer["request_id"]), tokenizer.encode(prompt), TOKENS, config.vocab_size)
            assert answer["token_ids"] == tokens[: len(answer["token_ids"])]
            if answer["finish_reason"] == "error":
                assert len(answer["token_ids"]) < TOKENS
            else:
                assert answer["finish_reason"] == "length" or answer["token_ids"][-1] in config.eos_token_ids
        return end.value.code, found, err

    call.length = lambda prompt: len(tokenizer.encode(prompt))
    return call


@pytest.mark.parametrize("drafts", [0, 3])
def test_two_ranks_one_step_ahead_give_the_same_tokens_after_a_loss(run, monkeypatch, tmp_path, drafts):
    monkeypatch.setenv("MORTAL_MARK", str(tmp_path / "killed"))
    status, found, err = run("mortal:MortalRunner", "--restart", "1", "--slots", "1", drafts=drafts)
    assert status == 0, err
    assert "started again 1 time(s)" in err
    assert "overlap" not in err
    assert ("drafts accepted" in err) is bool(drafts), err
    assert not [answer for answer in found if answer["finish_reason"] == "error"]


@pytest.mark.parametrize(
    ("method", "drafts"), [("launch", 0), ("launch", 3), ("propose", 3), ("check", 0), ("check", 3)]
)
@pytest.mark.parametrize("split", [(), ("--split", "1,1")], ids=["one worker", "split"])
def test_two_ranks_that_both_raise_one_step_ahead_serve_the_others(run, monkeypatch, method, drafts, split):
    monkeypatch.setenv("RAISING_METHOD", method)
    monkeypatch.setenv("RAISING_RANKS", "0,1")
    marked = "class Reader: takes what comes"
    marked = next(marked[:end] for end in range(1, len(marked)) if run.length(marked[:end]) == MARK)
    prompts = (*PROMPTS[:2], marked, *PROMPTS[2:])
    status, found, err = run("raising:RaisingRunner", "--slots", "2", *split, drafts=drafts, prompts=prompts)
    assert status == 2, err
    assert "was lost" not in err
    failed = [answer for answer in found if answer["finish_reason"] == "error"]
    assert found[2] in failed
    assert len(failed) <= 2
    says = rf"RaisingRunner\.{method} raised RuntimeError: no memory \(raising\.py:\d+\)"
    for answer in failed:
        assert re.fullmatch(says, answer["message"])
