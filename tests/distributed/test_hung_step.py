"""A rank that hangs in a step while its other threads live: its step has a limit, after which the rank is lost."""

import contextlib
import json
from functools import partial

import pytest
from hal_engine.distributed.step_clock import StepClock
from hal_engine.timeouts import TIMEOUTS

from hal.cli import main
from tests.split.rows import Own

pytestmark = pytest.mark.long(20)
JOB = ("run", "--device", "cpu", "--prompt", "def main(", "--temperature=0", "--max-tokens", "8", "--json", "-v")
WAYS = [("--dp", "2"), ("--split", "1,1")]
LIMIT = 4.0
LATE = f"rank(s) [0] have not ended the step within {LIMIT:g} s"


class Clock:
    """A clock of seconds that a test advances."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds, watched):
        """So many seconds, with a look in each of them."""
        for _ in range(round(seconds)):
            self.now += 1.0
            assert watched.late() is None


def test_a_step_is_late_when_it_has_lasted_longer_than_the_limit():
    clock = Clock()
    watched = StepClock(2, LIMIT, clock)
    clock.pass_by(3 * LIMIT, watched)  # idle
    watched.given(1)
    clock.pass_by(LIMIT, watched)
    clock.now += 0.1
    assert watched.late() == 1


def test_a_steps_time_begins_when_the_step_before_it_has_ended():
    clock = Clock()
    watched = StepClock(1, LIMIT, clock)
    watched.given(0)
    watched.given(0)
    clock.pass_by(LIMIT, watched)
    watched.taken(0)
    clock.pass_by(LIMIT, watched)
    watched.taken(0)
    clock.pass_by(3 * LIMIT, watched)


def test_time_in_which_the_engine_was_stopped_does_not_count():
    """Its ranks may have been stopped with it, as by Ctrl-Z."""
    clock = Clock()
    watched = StepClock(1, LIMIT, clock)
    watched.given(0)
    clock.now += 1000.0
    assert watched.late() is None
    clock.pass_by(LIMIT - LIMIT / 4, watched)
    clock.now += 0.1
    assert watched.late() == 0


def test_a_step_is_late_however_short_a_beat_is(monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "beat", 0.01)
    clock = Clock()
    watched = StepClock(1, LIMIT, clock)
    watched.given(0)
    clock.pass_by(LIMIT, watched)
    clock.now += 0.1
    assert watched.late() == 0


@pytest.fixture
def hangs(monkeypatch, tmp_path, tmp_path_factory):
    """One rank hangs in its third step: the only one with work, of the first ranks. From then on each look at the clock
    is a second later."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("ipc")))
    mark, started = tmp_path / "hung", []
    monkeypatch.setenv("HAL_RANKS_STEP", str(LIMIT))
    clock = Clock()

    def now():
        clock.now += mark.exists()
        return clock.now

    def ranks(size, *, before=0, among=None):
        started.append(size)
        victim = before + size == (among or size) and not mark.exists()
        return Own(size, ("hung", 0, 3, str(mark)) if victim else ())

    monkeypatch.setattr("hal_engine.distributed.rank_executor.StepClock", partial(StepClock, clock=now))
    monkeypatch.setattr("hal_engine.distributed.starting.LocalLaunch", ranks)
    return started


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([*JOB, *arguments])
    out, err = capsys.readouterr()
    return end.value.code, [json.loads(line) for line in out.splitlines()], err


def test_a_rank_that_hangs_in_a_step_is_lost(capsys, hangs):
    status, _, err = command(capsys, "--dp", "2")
    assert status == 1
    expected = f"hal: error: rank 0 was lost in step 3: {LATE}; not delivered: r0 from "
    assert expected in err
    assert "(HAL_RANKS_STEP)" in err


def test_requests_of_a_worker_that_hangs_get_their_error(capsys, hangs):
    status, (answer,), err = command(capsys, "--split", "1,1")
    assert status == 2
    assert answer["finish_reason"] == "error"
    assert f"decode worker 0 was lost: rank 0 was lost in step 3: {LATE}" in err


@pytest.mark.parametrize("way", WAYS, ids="=".join)
def test_with_restart_requests_go_on_after_a_hang(way, capsys, hangs):
    with contextlib.suppress(SystemExit):
        main(list(JOB))
    alone = json.loads(capsys.readouterr().out)
    status, (answer,), err = command(capsys, *way, "--restart", "1")
    assert status == 0, err
    assert answer["token_ids"] == alone["token_ids"]
    assert "started again 1 time(s)" in err
    assert len(hangs) == (2 if "--dp" in way else 3)
