"""Outputs to send, sinks and readers that are closed at the end, and a look for what they leave behind.

What asks for ``url`` runs twice: over a socket, and with its frames, made large, in shared memory.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest
from hal_core.output.records import OutputRecord, SlotStatus
from hal_core.slots.fields import FinishReason
from zmq.utils.garbage import GarbageCollectorThread

from hal.reading import OutputReader
from hal.transport import domains, open_sink, private_ipc_url, release_ipc
from hal.transport.urls import socket_of

needs_iceoryx2 = pytest.mark.skipif(
    importlib.util.find_spec("iceoryx2") is None, reason="needs iceoryx2: pip install 'iceoryx2>=0.10,<0.11'"
)


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

    def settle(self, error):
        self.settled.append(error)
        self.done.set()


class Large(Output):
    """The same with log-probabilities: its frame is too large for a checksum."""

    columns = 1 << 14


@pytest.fixture
def output(request):
    """The class of pending outputs: large ones where they may lie in shared memory."""
    shared = "url" in request.fixturenames and request.getfixturevalue("url").startswith("shm:")
    return Large if shared else Output


@pytest.fixture
def large():
    """The class of pending outputs whose frames are large."""
    return Large


def files_of(reader):
    """The files in memory of the reader's domain."""
    return sorted(domains.MEMORY.glob(f"{domains.prefix_of(reader._receiver._memory.name)}*"))


def lies_in_memory(array):
    """Whether the array's bytes are a mapping of a domain's file."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return f"{domains.MEMORY}/hal-" in line
    return False


@pytest.fixture
def shared_url():
    """A private address whose large frames lie in shared memory; nothing of it is left."""
    url = private_ipc_url(shared=True)
    yield url
    release_ipc(url)
    assert not socket_of(url).parent.exists()


@pytest.fixture(params=["ipc", pytest.param("shm", marks=needs_iceoryx2)])
def url(request, monkeypatch):
    """A private address. Its folder is gone afterwards, and so are its memory and every thread of the test."""
    before, made = set(threading.enumerate()), []

    def noted(socket, make=domains.make_domain):
        made.append(make(socket))
        return made[-1]

    monkeypatch.setattr(domains, "make_domain", noted)
    url = private_ipc_url(shared=request.param == "shm")
    yield url
    release_ipc(url)
    assert not socket_of(url).parent.exists()
    assert not [path for name, *_ in made for path in domains.MEMORY.glob(f"{domains.prefix_of(name)}*")]
    left = [thread for thread in threading.enumerate() if thread not in before]
    left = [thread for thread in left if not isinstance(thread, GarbageCollectorThread)]  # pyzmq's, one a process
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
