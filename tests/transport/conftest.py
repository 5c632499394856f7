"""Outputs to send, sinks and readers that are closed at the end, and a look for what they leave behind."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hal_core.records import FinishReason, OutputRecord, SlotStatus

from hal.reading import OutputReader
from hal.transport import open_sink, private_ipc_url, release_ipc


class Output:
    """A pending output of one token for each request; it may wait for a latch, or fail."""

    def __init__(self, step, requests=("a", "b"), *, finish=FinishReason.NONE, error=None, latch=None):
        self.step, self.request_ids, self.finish = step, tuple(requests), finish
        self.error, self.latch = error, latch
        self.settled = []
        self.entered = threading.Event()  # resolve() was called
        self.done = threading.Event()  # settle() was called

    def resolve(self):
        self.entered.set()
        if self.latch is not None:
            assert self.latch.wait(20)
        if self.error is not None:
            raise self.error
        rows = len(self.request_ids)
        return OutputRecord(
            self.step,
            self.request_ids,
            np.full(rows, SlotStatus.TOKEN, np.uint8),
            np.full(rows, self.finish, np.uint8),
            np.full(rows, self.step),
            np.ones(rows, np.int32),
            np.arange(rows) + 100 * self.step,
            np.zeros(rows, np.bool_),
        )

    def settle(self, error):
        self.settled.append(error)
        self.done.set()


@pytest.fixture
def output():
    """The class of pending outputs."""
    return Output


@pytest.fixture
def url():
    """A private address. Its folder is gone afterwards, and so is every thread of the test."""
    before = set(threading.enumerate())
    url = private_ipc_url()
    yield url
    release_ipc(url)
    assert not Path(url.removeprefix("ipc://")).parent.exists()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture
def opened(url):
    """Open sinks and readers of ``url``; what the test does not close is closed without ado."""
    things = []

    def sink(**options):
        things.append(open_sink(url, **({"heartbeat": 0.05, "deadline": 10} | options)))
        return things[-1]

    def reader(**options):
        things.append(OutputReader(url, **({"timeout": 10} | options)))
        return things[-1]

    yield type("Opened", (), {"sink": staticmethod(sink), "reader": staticmethod(reader)})
    for thing in things:
        if isinstance(thing, OutputReader):
            thing.close()
        else:
            try:
                thing.close(0)
            except ConnectionError:
                continue


def steps_of(reader, count):
    """The steps of the next records."""
    return [reader.read(10).record.step for _ in range(count)]


@pytest.fixture
def steps():
    return steps_of
