"""The heartbeat of an engine process: what its absence, and an unchanging step, mean to the caller."""

from types import SimpleNamespace

import pytest
from hal_engine.generation.process import CallerEnd
from hal_engine.generation.pulse import PulseWatch
from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel


class Caller:
    """A watch with a clock of the test, and what its channel shows."""

    def __init__(self):
        self.now = 100.0
        self.channel = SimpleNamespace(heard=0.0, number=0)
        self.watch = PulseWatch(self.channel, clock=lambda: self.now)

    def pass_by(self, seconds, *beats):
        """Let time pass in small parts, each with a look; ``beats`` come with the last."""
        while seconds > 0:
            self.now += min(seconds, 0.5)
            seconds -= 0.5
            if seconds <= 0:
                for step in beats:
                    self.channel.heard, self.channel.number = self.now, step
            self.watch.look()
        return self.watch.silent, self.watch.late


@pytest.fixture
def caller():
    return Caller()


def test_a_process_without_a_beat_is_silent_until_the_next_one(caller):
    assert caller.pass_by(TIMEOUTS.process_silence - 1, 0) == (False, 0)
    assert caller.pass_by(TIMEOUTS.process_silence) == (False, 0)
    assert caller.pass_by(1.0) == (True, 0)
    assert caller.pass_by(0.5, 0) == (False, 0)


def test_silence_counts_in_full_however_short_a_beat_is(caller, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "beat", 0.01)
    assert caller.pass_by(TIMEOUTS.process_silence + 0.5) == (True, 0)


def test_time_in_which_the_caller_was_stopped_is_no_silence(caller):
    caller.now += 3600
    caller.watch.look()
    assert not caller.watch.silent
    assert caller.pass_by(TIMEOUTS.process_silence) == (True, 0)


def test_the_silence_of_loading_does_not_count(caller):
    caller.pass_by(60)
    caller.watch.begin()
    assert caller.pass_by(1.0) == (False, 0)


def test_a_step_that_does_not_end_is_late_and_a_new_one_is_not(caller, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "step", 5.0)
    for step in (3, 4, 4):
        assert caller.pass_by(2.0, step) == (False, 0)
    for _ in range(2):
        assert caller.pass_by(1.0, 4) == (False, 0)
    assert caller.pass_by(2.0, 4) == (False, 4)
    assert caller.pass_by(1.0, 5) == (False, 0)
    assert caller.pass_by(100.0) == (True, 5), "it is also late where no beat tells so"
    assert caller.pass_by(1.0, 0)[1] == 0
    assert [caller.pass_by(2.0, 0)[1] for _ in range(5)] == [0] * 5, "between two steps there is no limit"


def test_an_engine_process_beats_within_a_silence_that_is_shorter_than_a_beat(monkeypatch):
    """The reader would wait for ever without one: this test has no time of its own."""
    monkeypatch.setattr(TIMEOUTS, "beat", 1e6)
    monkeypatch.setattr(TIMEOUTS, "process_silence", 0.04)
    mine, theirs = Channel.pair()
    end, first = CallerEnd(theirs), mine.heard
    while mine.heard == first:
        mine.receive()
    mine.close()
    end.close(0.0)
