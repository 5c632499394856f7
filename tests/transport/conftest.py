"""Outputs to send, sinks and readers that are closed at the end, keys of two sides, and a check for leftovers."""

import threading

import numpy as np
import pytest
from hal_core.errors import Undelivered
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.fields import FinishReason
from hal_engine.reading import OutputReader
from hal_engine.transport import open_sink, private_ipc_url, release_ipc
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.urls import socket_of

ANY = "tcp://127.0.0.1:*"
HANGS = 30.0
NOTHING = "it sent nothing: it is no listener for '{}', its keys differ, or its process has ended"


def keys_of_two():
    """The keys of a listener and of its one caller."""
    listener, caller = CurveKeys.new(), CurveKeys.new()
    return listener.knowing(caller.public), caller.knowing(listener.public)


class Output:
    """A pending output of one token for each request; it may wait for a latch, or fail."""

    columns = 0  #: of log-probabilities

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
        optional = {}
        if self.columns:
            numbers = np.arange(rows * self.columns, dtype=np.int32).reshape(rows, self.columns) + self.step
            numbers[:, 0] = np.arange(rows) + 100 * self.step
            optional = {"logprob_token_ids": numbers, "logprobs": numbers.astype(np.float32)}
        return OutputRecord(
            self.step,
            self.request_ids,
            np.full(rows, SlotStatus.TOKEN, np.uint8),
            np.full(rows, self.finish, np.uint8),
            np.full(rows, self.step),
            np.ones(rows, np.int32),
            np.arange(rows) + 100 * self.step,
            np.zeros(rows, np.bool_),
            **optional,
        )

    def complete(self, error):
        self.settled.append(error)
        self.done.set()


class Large(Output):
    """The same with log-probabilities: its frame is too large for a checksum."""

    columns = 1 << 14


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
    assert not socket_of(url).parent.exists()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture
def opened(url):
    """Open sinks and readers of ``url``; those that the test leaves open are closed at the end."""
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


def close_in_thread(sink, timeout=10):
    """Close while this thread continues to read. Joining raises the error of close."""
    failure = []

    def close():
        try:
            sink.close(timeout)
        except Undelivered as error:
            failure.append(error)

    thread = threading.Thread(target=close)
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        if failure:
            raise failure[0]

    return join
