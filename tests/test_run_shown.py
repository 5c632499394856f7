"""What ``hal run`` has generated is shown to the end, however slowly standard output is read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hal_core.output.records import OutputRecord

from hal.cli import run_ranks, run_session
from hal.transport.connection import Connection


class Slow:
    """Answers that take nothing until they are let."""

    def __init__(self):
        self.begun, self.let, self.taken = threading.Event(), threading.Event(), []

    def take(self, record):
        self.begun.set()
        assert self.let.wait(60)
        self.taken.append(record.step)


def record(step):
    one = np.ones(1, np.uint8)
    return OutputRecord(step, ("r0",), one, one, np.array([step]), one.astype("i4"), np.array([7]), one < 0)


class Output:
    """A step's output that is there already."""

    def __init__(self, step):
        self.step = step

    def resolve(self):
        return record(self.step)

    def complete(self, error):
        assert error is None


def plain(answers, monkeypatch):
    monkeypatch.setattr(run_session, "_CLOSE_SECONDS", 0.01)
    show = run_session._Show(answers, None, None)
    for step in range(3):
        show.sink.put(Output(step))
    return show


def on_ranks(answers, monkeypatch):
    monkeypatch.setattr(run_ranks, "_LEAVE_SECONDS", 0.01)
    show = run_ranks._Shown().by(answers)
    for step in range(3):
        show.take(record(step))
    return show


@pytest.mark.parametrize("make", [plain, on_ranks])
def test_it_waits_for_a_reader_that_takes_its_time(make, monkeypatch):
    answers = Slow()
    show = make(answers, monkeypatch)

    def use():
        with show:
            pass

    leaving = threading.Thread(target=use)
    leaving.start()
    assert answers.begun.wait(60)
    leaving.join(0.5)  # it would have given up long ago
    assert leaving.is_alive()
    answers.let.set()
    leaving.join(60)
    assert answers.taken == [0, 1, 2]


def test_a_run_without_records_does_not_wait_for_a_connection_that_was_not_made(monkeypatch):
    """As when every request is refused at once: the sink closes before it has found its reader."""
    monkeypatch.setattr(Connection, "_look_for_reader", lambda connection: None)
    monkeypatch.setattr(run_session, "_CLOSE_SECONDS", 5.0)
    with run_session._Show(Slow(), None, None) as show:
        pass
    assert not show._thread.is_alive()
