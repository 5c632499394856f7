"""An engine that does not read while its workers die, with backlogs of every size: it loses sessions, never itself.

libzmq 4.3 ends the process with ``Assertion failed: !_io_error`` when a connection breaks whose input was stopped at
the high-water mark, while a ZeroMQ message (a heartbeat, or the answer to the peer's) is due on it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hal_engine.transport import private_ipc_url, release_ipc
from hal_engine.transport.sockets import HIGH_WATER_MARK

from tests import share

pytestmark = pytest.mark.long(24)

BACKLOGS = [1, 50, 64, 129, 400, 1000]
ENGINE = """
    import sys, time
    from hal_engine.reading import OutputReader, SessionLost

    readers = [OutputReader(url, grace=0.1) for url in sys.argv[1:]]
    print(*[reader.url for reader in readers], flush=True)
    first = [reader.read(60) for reader in readers]
    print("met", flush=True)
    sys.stdin.readline()  # the workers are dead
    time.sleep(2.5)       # ZeroMQ's heartbeats, were there any, would be due by now
    for reader in readers:
        sequences = [1]
        try:
            while (frame := reader.read(60)) is not None:
                sequences.append(frame.header.sequence)
        except SessionLost as lost:
            assert lost.last_sequence == len(sequences), lost
            assert lost.requests == ("a",), lost
        assert sequences == list(range(1, len(sequences) + 1))
        print(len(sequences), flush=True)
    for reader in readers:
        reader.close()
"""
WORKER = """
    import sys, time
    import numpy as np
    from hal_core.errors import Undelivered
    from hal_core.output.records import OutputRecord
    from hal_engine.transport import open_sink

    class Output:
        step = 0
        def resolve(self):
            one = np.ones(1, np.uint8)
            return OutputRecord(0, ("a",), one, one * 0, np.arange(1), one.astype("i4"), np.arange(1), one < 0)
        def complete(self, error):
            assert error is None

    sinks = {open_sink(argument.split("=")[1], deadline=0.01): int(argument.split("=")[0]) for argument in sys.argv[1:]}
    for sink in sinks:
        sink.put(Output())
    sys.stdin.readline()  # the engine has met them, and reads no more
    for sink, count in sinks.items():
        for number in range(1, count):
            sink.put(Output())
            while sink.counters()["queued"] or not sink._window.is_sent:
                time.sleep(0)  # each frame a message of its own
    print("sent", flush=True)
    sys.stdin.readline()
    for sink in sinks:
        try:
            sink.close(0.01)
        except Undelivered:
            continue
"""


def start(code, *arguments):
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(process):
    process.stdin.write("\n")
    process.stdin.flush()


WAYS = [(scheme, end) for scheme in ("ipc", "tcp") for end in ("killed", "closed")]


@pytest.mark.steady
@pytest.mark.parametrize(("scheme", "end"), share.cases(WAYS, {("ipc", "killed"), ("tcp", "closed")}.__contains__))
def test_g19_an_engine_that_does_not_read_outlives_workers_that_end(scheme, end):
    urls = [private_ipc_url() if scheme == "ipc" else "tcp://127.0.0.1:*" for _ in BACKLOGS]
    with start(ENGINE, *urls) as engine:
        there = engine.stdout.readline().split()
        with start(WORKER, *[f"{count}={url}" for count, url in zip(BACKLOGS, there, strict=True)]) as worker:
            assert engine.stdout.readline() == "met\n"
            tell(worker)
            assert worker.stdout.readline() == "sent\n"
            if end == "killed":
                worker.kill()
            else:
                tell(worker)
            worker.wait()
        tell(engine)
        told = engine.stdout.read().split()
    for url in urls:
        release_ipc(url)
    assert engine.returncode == 0
    counts = list(map(int, told))
    # Frames still in its own ZeroMQ are gone with it, also if it closes and cannot wait.
    assert all(size - HIGH_WATER_MARK <= count <= size for count, size in zip(counts, BACKLOGS, strict=True))


STRANGER = """
    import socket, struct, time
    from hal_engine.reading import OutputReader

    with OutputReader("tcp://127.0.0.1:*") as reader:
        host, port = reader.url.removeprefix("tcp://").split(":")
        ready = b"\\5READY\\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        greeting = b"\\xff" + bytes(8) + b"\\x7f\\3\\0" + b"NULL".ljust(20, b"\\0") + bytes(32)
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(greeting + struct.pack("BB", 4, len(ready)) + ready)
            stranger.recv(107, socket.MSG_WAITALL)  # greeted too
            stranger.sendall(b"\\0\\1x" * 200 + b"\\4\\7\\4PING\\0\\0" + b"\\0\\1x")
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            time.sleep(0.5)
        time.sleep(0.5)
        while reader.counters()["skipped"] < 201:
            reader.read(0.2)
"""


def test_g26_a_strangers_heartbeat_behind_a_backlog_ends_no_engine():
    """libzmq answers when the backlog is read, on a connection that is gone; had its input been stopped, it aborts."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(STRANGER)], timeout=60, check=False)
    assert done.returncode == 0
