"""The heartbeat of an engine process: what its absence, and an unchanging step, mean to the caller."""

from __future__ import annotations

import os
import struct

import pytest
from hal_engine.generation.pulse import Pulse, PulseWatch
from hal_engine.timeouts import TIMEOUTS


class Caller:
    """A watch with a clock of the test, and the other end of its pipe."""

    def __init__(self):
        self.now = 100.0
        self.reading, self.writing = os.pipe()
        self.watch = PulseWatch(self.reading, clock=lambda: self.now)

    def pass_by(self, seconds, *beats):
        """Let time pass in small parts, each with a look; ``beats`` come with the last."""
        while seconds > 0:
            self.now += min(seconds, 0.5)
            seconds -= 0.5
            if seconds <= 0:
                os.write(self.writing, b"".join(struct.pack("<q", step) for step in beats))
            self.watch.look()
        return self.watch.silent, self.watch.late


@pytest.fixture
def caller():
    made = Caller()
    yield made
    os.close(made.reading)
    os.close(made.writing)


def test_a_process_without_a_beat_is_silent_until_the_next_one(caller):
    assert caller.pass_by(TIMEOUTS.process_silence - 1, 0) == (False, 0)
    assert caller.pass_by(TIMEOUTS.process_silence) == (False, 0)
    assert caller.pass_by(1.0) == (True, 0)
    assert caller.pass_by(0.5, 0) == (False, 0)


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


def test_a_process_beats_in_a_thread_of_its_own_with_its_step(caller, monkeypatch):
    monkeypatch.setattr(TIMEOUTS, "process_beat", 0.001)
    pulse = Pulse(caller.writing)
    pulse.step = 7
    os.set_blocking(caller.reading, True)
    while struct.unpack("<q", os.read(caller.reading, 8)) != (7,):
        pass
    pulse.close()
