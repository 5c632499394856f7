"""Steps overlap on several ranks too: the engine sends them one step ahead, and continues after a loss.

Ranks run on the sim device as late as possible, with one slot, so that each request enters where one has just ended.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hal_core.slots.admission import draw_seed
from hal_sim import NoCompiler
from hal_sim.build import core_library
from hal_sim.mixing import mixed

from hal.cli import main
from hal.model import DEFAULT_CHECKPOINT
from hal.model.config import read_config
from hal.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.long(30), pytest.mark.conform]  # four processes import Paddle, and then four more
PROMPTS = ("def main(", "x = ", "class Reader:", "if not")
TOKENS = 10


@pytest.mark.parametrize("drafts", [0, 3])
def test_two_ranks_one_step_ahead_give_the_same_tokens_after_a_loss(capsys, monkeypatch, tmp_path, drafts):
    try:
        core_library()
    except NoCompiler as error:
        pytest.skip(str(error))
    pytest.importorskip("paddle", reason="its launcher starts the ranks", exc_type=ImportError)
    settings = {"HALSIM_MODE": "2", "HALSIM_STAGED": "0", "HAL_RANKS_TIMEOUT": "20", "XDG_RUNTIME_DIR": str(tmp_path)}
    for name, value in {**settings, "MORTAL_MARK": str(tmp_path / "killed")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(Path(__file__).parent)
    arguments = ["--device", "sim", "--runner", "mortal:MortalRunner", "--tp", "2", "--restart", "1", "--overlap", "on"]
    arguments += [
        "--slots",
        "1",
        "--chunk",
        "4",
        "--temperature=0",
        "--max-tokens",
        str(TOKENS),
        "--seed",
        "3",
        "--json",
        "-v",
    ]
    arguments += ["--drafts", str(drafts)] if drafts else []
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments, *(part for prompt in PROMPTS for part in ("--prompt", prompt))])
    out, err = capsys.readouterr()
    assert end.value.code == 0, err
    assert "started again 1 time(s)" in err
    assert "overlap" not in err
    assert ("drafts accepted" in err) is bool(drafts), err
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, config)
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == len(PROMPTS)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens = mixed(draw_seed(3, answer["request_id"]), tokenizer.encode(prompt), TOKENS, config.vocab_size)
        assert answer["token_ids"] == tokens[: len(answer["token_ids"])]
        assert answer["finish_reason"] == "length" or answer["token_ids"][-1] in config.eos_token_ids
