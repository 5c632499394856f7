"""Places that grow with the frames, and /dev/shm where it is short: no frame is lost, and nobody ends by SIGBUS."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
from hal_core.errors import Unavailable

from hal.reading import OutputReader, SessionStarted
from hal.transport import domains
from hal.transport.shared_memory import SLOTS, SharedSender
from hal.transport.urls import socket_of

from .conftest import needs_iceoryx2

pytestmark = needs_iceoryx2


@pytest.fixture
def url(shared_url):
    return shared_url


@pytest.fixture
def rows(large):
    """Make outputs of so many rows of 128 KB."""

    def make(step, rows):
        pending = large(step, requests=[f"r{row}" for row in range(rows)])
        pending.columns = (1 << 14) - 64
        return pending

    return make


def forgotten(sink):
    """Wait until the sink holds nothing any more; it says so to whoever waits for room."""
    with sink._room:
        return sink._room.wait_for(lambda: not sink._outputs and not len(sink._window), 10)


@pytest.mark.parametrize(("capacity_bytes", "shared"), [(64 << 20, 4), (SLOTS * (1 << 18), 2), (1 << 20, 0)])
def test_places_grow_with_the_frames_up_to_the_sinks_bound_and_the_rest_comes_as_bytes(
    opened, rows, capacity_bytes, shared
):
    reader, sink = opened.reader(), opened.sink(capacity_bytes=capacity_bytes)
    for step, count in enumerate((2, 4, 1, 8)):
        pending = rows(step, count)
        sink.put(pending)
        assert reader.read(10).record == pending.resolve()
        reader.acknowledge()
        assert forgotten(sink)
    assert reader.counters()["shared"] == shared


def test_places_that_hold_what_is_not_acknowledged_do_not_grow_and_nothing_is_skipped(opened, rows, monkeypatch):
    """While the reader is busy. Then they wait until it has caught up: also smaller frames come as bytes."""
    offered, all_offered = [], threading.Event()

    def offer(memory, *arguments, really=SharedSender.offer):
        offered.append(really(memory, *arguments))
        if len(offered) == 5:
            all_offered.set()
        return offered[-1]

    monkeypatch.setattr(SharedSender, "offer", offer)
    events = []
    reader, sink = opened.reader(on_event=events.append, auto_ack=False), opened.sink()
    sink.put(rows(0, 1))
    assert reader.read(10).record.step == 0
    for step, count in enumerate((1, 2, 4, 1), start=1):
        sink.put(rows(step, count))
    assert all_offered.wait(10)
    assert offered == [True, True, False, False, False]
    for step, count in enumerate((1, 2, 4, 1), start=1):
        assert reader.read(10).record == rows(step, count).resolve()
    assert reader.counters() == {"frames": 5, "duplicates": 0, "skipped": 0, "shared": 2}
    assert [type(event) for event in events] == [SessionStarted]
    reader.acknowledge()
    assert forgotten(sink)
    sink.put(rows(5, 4))
    assert reader.read(10).record == rows(5, 4).resolve()
    assert reader.counters()["shared"] == 3


def test_g26_a_reader_without_room_says_who_what_and_the_cure_and_leaves_nothing(url, monkeypatch):
    monkeypatch.setattr(domains, "MARGIN", 1 << 60)
    socket = socket_of(url)
    before = set(socket.parent.iterdir())
    with pytest.raises(Unavailable, match=r"no shared memory for .*output: /dev/shm has no room") as raised:
        OutputReader(url)
    assert raised.value.argument == "url"
    assert "--shm-size" in raised.value.cure
    assert set(socket.parent.iterdir()) == before
    monkeypatch.undo()
    OutputReader(url).close()  # the address is free


def test_a_file_system_without_a_limit_has_room(monkeypatch):
    class Found:
        f_blocks = f_bavail = 0
        f_frsize = 4096

    monkeypatch.setattr(domains.os, "statvfs", lambda _: Found)
    domains.check_room(1 << 40)


SMALL = """
    import os, subprocess, sys
    import numpy as np
    from hal_core.errors import Unavailable
    from hal.reading import OutputReader
    from hal.transport import domains, open_sink, private_ipc_url
    from hal.transport.shared_memory import SLOTS
    from hal_core.output.records import OutputRecord

    PAGE = 4096

    class Output:
        def __init__(self, columns):
            self.step, self.columns = 1, columns
        def resolve(self):
            one, ids = np.ones(1, np.uint8), np.zeros((1, self.columns), np.int32)
            return OutputRecord(self.step, ("a",), one, one * 0, np.arange(1), one.astype("i4"), np.arange(1), one < 0,
                                logprob_token_ids=ids, logprobs=ids.astype("f4"))
        def settle(self, error):
            pass

    def leave(size):
        found = os.statvfs("/dev/shm")
        with open("/dev/shm/filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - size)

    size, point, left = sys.argv[1:]
    left = eval(left)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=" + size, "tmpfs", "/dev/shm"], check=True)
    url = private_ipc_url(shared=True)
    if point == "reader":
        leave(left)
    try:
        reader = OutputReader(url, timeout=20)
    except Unavailable as error:
        print(error)
        sys.exit()
    with reader:
        if point == "queue":
            leave(left)
        sink = open_sink(url)
        sink.put(Output(1))
        assert reader.read(20).record == Output(1).resolve()
        if point == "places":
            leave(left)
        for _ in range(3):
            sink.put(Output(1 << 17))
            assert reader.read(20).record == Output(1 << 17).resolve()
        print(reader.counters()["shared"])
        reader.acknowledge()
        sink.close(10)
"""


def in_small_memory(size, point="", left="0"):
    """Run the code above with a /dev/shm of its own, in a mount namespace of its own."""
    if subprocess.run(["unshare", "-m", "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no mount namespace may be made here")
    arguments = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(SMALL), size, point, left]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    if "CalledProcessError" in done.stderr:
        pytest.skip("nothing may be mounted here")
    assert done.returncode == 0, done.stderr  # a write where there is no room would end it (SIGBUS)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize(("size", "shared"), [("4m", "0"), ("64m", "3")])
def test_g26_where_memory_is_short_frames_go_through_the_socket_and_the_log_says_so(size, shared):
    said, logged = in_small_memory(size)
    assert said == shared
    assert ("has no room for" in logged) == (shared == "0")
    assert shared == "0" or not logged


@pytest.mark.parametrize("left", ["0", "PAGE", "domains.MARGIN - PAGE"])
def test_g26_a_reader_that_opens_where_hardly_anything_is_left_says_so(left):
    said, logged = in_small_memory("64m", "reader", left)
    assert "/dev/shm has no room for" in said
    assert "--shm-size" in said
    assert not logged


PLACES = "SLOTS * (1 << 21)"


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("queue", "0"),
        ("queue", "domains.MARGIN - PAGE"),
        ("places", "0"),
        ("places", "PAGE"),
        ("places", "domains.MARGIN - PAGE"),
        ("places", PLACES),
        ("places", f"{PLACES} + domains.MARGIN - PAGE"),
    ],
)
def test_g26_where_memory_runs_short_later_the_socket_serves_and_the_log_says_so(point, left):
    said, logged = in_small_memory("64m", point, left)
    assert said == "0"
    assert "no shared memory for" in logged
    assert "through the socket" in logged
    assert "has no room for" in logged


@pytest.mark.parametrize(("point", "left"), [("reader", "40 << 20"), ("places", f"{PLACES} + 2 * domains.MARGIN")])
def test_what_is_asked_for_is_enough(point, left):
    said, logged = in_small_memory("64m", point, left)
    assert (said, logged) == ("3", "")
