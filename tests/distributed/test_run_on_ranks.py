"""``hal run`` on ranks, in separate processes: its output, its files, and its refusals."""

import contextlib
import json

import pytest
from hal_core import HalError, InvalidValue
from hal_engine.cli.run import _listed
from hal_engine.distributed import engine as distributed_engine
from hal_engine.generation.plan import ModelPlan
from hal_engine.opening import open_engine
from hal_engine.options import EngineOptions
from hal_paddle_runner.ranks import HOST, library_of

from hal.cli import main
from tests.commands import TWO_PROMPTS, environment, left_in, start

pytestmark = pytest.mark.long(15)


def command(folder, *arguments, **variables):
    """Run ``hal run`` to its end: status, standard output, standard error."""
    process = start(folder, "run", *arguments, env=environment(folder, HAL_CHECK_RANKS="1", **variables))
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.steady
@pytest.mark.conform
def test_two_ranks_print_what_one_does_and_leave_nothing(tmp_path, capsys):
    """Neither variables of a job on a cluster nor devices that are not there matter."""
    with contextlib.suppress(SystemExit):
        main(["run", "--device", "cpu", *TWO_PROMPTS])
    alone = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    others = {"CUDA_VISIBLE_DEVICES": "0", "PADDLE_NNODES": "2"}
    status, out, err = command(tmp_path, *TWO_PROMPTS, "--tp", "2", "--device", "cpu", **others)
    assert status == 0, err
    on_ranks = [json.loads(line) for line in out.splitlines()]
    for one, two in zip(alone, on_ranks, strict=True):
        assert (one["token_ids"], one["text"], one["device"]) == (two["token_ids"], two["text"], two["device"])
    assert "tp 2 x dp 1" in err
    assert left_in(tmp_path) == []


ENGINE = """
import sys
import hal.cli, hal_engine.distributed.starting
class NoRanks:
    def __init__(self, size, **_): pass
    def start(self, url): pass
    def ended(self): return "there are none"
    def end(self, patience): pass
hal_engine.distributed.starting.LocalLaunch = NoRanks
try:
    hal.cli.main(["run", "--device", "cpu", "--prompt", "x", "--tp", "2", "--speculate", "hybrid"])
except SystemExit as end:
    assert end.code == 1, end.code
sys.exit("paddle" in sys.modules or "torch" in sys.modules)
"""


def test_the_engine_imports_no_framework(tmp_path):
    """Up to the point where its ranks would start, and when they are lost."""
    with start(tmp_path, code=ENGINE) as process:
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--tp", "3"], "--tp: 3 ranks cannot share out num_attention_heads = 4 (give a number that divides it, as 2)"),
        (["--tp", "0"], "--tp: 0 (give a whole number of at least 1)"),
        (["--dp", "-1"], "--dp: -1 (give a whole number of at least 1)"),
        (["--restart", "-1"], "--restart: -1 (give a whole number of at least 0)"),
        (["--sampling", "some"], "--sampling: 'some' (give first or every-rank)"),
        (["--sampling", "every-rank"], "--sampling: needs more than one rank (leave it out, or"),
        (["--dp", "2", "--sampling", "every-rank"], "--sampling: each group has a single rank (leave it"),
        (["--share-devices"], "--share-devices: needs more than one rank (leave it out, or give"),
        (["--restart", "2"], "--restart: needs more than one rank (leave it out, or give --tp"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_is_started(arguments, refusal, capsys):
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", "--prompt", "x", *arguments])
    assert end.value.code == 2
    assert refusal in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"split": (1, 1)}], ids=str)
def test_the_loss_of_a_worker_is_said_twice_of_a_split_alone(monkeypatch, ranks):
    notes = []

    def lost(setup, start, *, on_record, note):
        note("a worker was lost")
        raise HalError("no worker is left")

    monkeypatch.setattr(distributed_engine, "engine_of_ranks", lost)
    setup = ModelPlan(None).serve(EngineOptions(device="cpu", **ranks))
    with pytest.raises(HalError, match="no worker is left"), open_engine(setup, print, note=notes.append):
        pass
    assert notes == ["a worker was lost"] * ("split" in ranks)


def test_ranks_refuse_a_place_that_paddle_lacks_by_its_option():
    with pytest.raises(InvalidValue, match="--model-place: 'foo' is not a place"):
        library_of("foo", HOST)


def test_states_of_runners_are_not_compared_and_that_is_said(capsys, monkeypatch):
    monkeypatch.setenv("HAL_CHECK_RANKS", "1")
    with pytest.raises(SystemExit) as end:
        main(["run", "--device", "cpu", "--prompt", "x", "--tp", "2", "--runner", "hal_sim.mixing:MixRunner"])
    assert end.value.code == 2
    assert (
        "HAL_CHECK_RANKS: the comparison of the ranks' states goes with the Paddle model's" in capsys.readouterr().err
    )


def test_all_that_was_not_delivered_is_named():
    lost = [("r0", 12, -1), ("r1", 12, -1), ("r3", 12, -1), ("r2", 5, 3), ("r2", 2, 3), ("r4", 0, -1)]
    lost += [(f"r{number}", 0, -1) for number in range(5, 4000)] + [("<step 7>", -1, -1)]
    assert _listed(lost) == (
        "r0 to r1 from 12 on, r3 from 12 on, r2 from 2 on, r4 to r3999 from 0 on, <step 7> from 0 on"
    )
