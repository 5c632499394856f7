"""A private System V key for each test: outputs to send there, FastDeploy's own way of reading, and the leftovers."""

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hal_core.errors import Undelivered
from hal_core.output.records import OutputRecord, SlotStatus
from hal_engine.transport import open_sink
from hal_fastdeploy.sysv.queue import table

HERE = Path(__file__).parent
sysv_ipc = pytest.importorskip("sysv_ipc")
_spec = importlib.util.spec_from_file_location("legacy_reader", Path(__file__).with_name("legacy_reader.py"))
legacy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(legacy)
#: Queues are of the whole machine: a number that no other process of these tests uses at the time.
_ids = itertools.count(os.getpid() % (1 << 12) << 8)


class Output:
    """One token for each of some slots."""

    def __init__(self, step, slots=(0, 1), token=None, latch=None):
        self.step, self.slots, self.token, self.latch = step, slots, token, latch
        self.request_ids = tuple(f"r{slot}" for slot in slots)
        self.batch_ids, self.batch_size = tuple(slots), max(slots) + 1
        self.settled = []

    def ready(self):
        return self.latch is None or self.latch.is_set()

    def resolve(self):
        if self.latch is not None:
            assert self.latch.wait(20)
        n = len(self.slots)
        tokens = np.full(n, self.step if self.token is None else self.token)
        status = np.full(n, SlotStatus.TOKEN, np.uint8)
        zeros = np.zeros(n, np.uint8)
        return OutputRecord(
            self.step, self.request_ids, status, zeros, np.full(n, self.step), np.ones(n, np.int32), tokens, zeros > 0
        )

    def complete(self, error):
        self.settled.append(error)


class Place:
    """A key of the test's own."""

    def __init__(self, folder):
        self.folder, self.number = folder, next(_ids)
        self.key = legacy.custom_ftok(folder, self.number)
        self.sinks, self.queues = [], []

    def url(self, layout="plain", **options):
        extra = "".join(f"&{name}={value}" for name, value in options.items())
        return f"sysv://{self.folder}?layout={layout}&id={self.number}{extra}"

    def sink(self, layout="plain", capacity=1024, deadline=10, **options):
        self.sinks.append(open_sink(self.url(layout, **options), capacity=capacity, deadline=deadline))
        return self.sinks[-1]

    def reader(self, operation="get_output"):
        self.queues.append(legacy.LegacyQueue(self.key, operation))
        return self.queues[-1]

    def mode(self):
        return next(row["perms"] for row in table().values() if row["key"] == self.key)

    def end(self):
        """Close the sinks and remove their leftovers."""
        for sink in self.sinks:
            try:
                sink.close(0)
            except Undelivered:
                continue
        self.reader().remove()
        with contextlib.suppress(sysv_ipc.ExistentialError):  # its lock stays with a queue, as the queue stays
            sysv_ipc.Semaphore(self.key).remove()


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("INFERENCE_MSG_QUEUE_ID", "INFERENCE_MSG_ID"):
        monkeypatch.delenv(name, raising=False)
    place = Place(tmp_path)
    yield place
    place.end()


def receive(queue, count, seconds=10):
    """Wait for the next messages and return them."""
    found, end = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        data = queue.receive()
        if data is None:
            time.sleep(0.001)
        else:
            found.append(data)
    return found


def until(condition, seconds=20):
    """Wait until the condition holds; another thread makes it true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


def undelivered(sink, timeout=0.0):
    """What closing reports as undelivered."""
    try:
        sink.close(timeout)
    except Undelivered as error:
        return list(error.records)
    return []


def started(code, *arguments, before=()):
    """A process that runs ``code`` with this folder and ``arguments``, and a pipe to and from it."""
    command = [*before, sys.executable, "-c", textwrap.dedent(code), str(HERE), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def put_until_closed(sink, step):
    """Send one step after another; the caller waits for SinkClosed."""
    while True:
        sink.put(Output(step))
        step += 1
        time.sleep(0.001)
