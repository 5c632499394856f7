"""An engine that does not read while its workers die, with backlogs of every size: it loses sessions, never itself."""

import subprocess
import sys
import textwrap

import pytest
from hal_engine.transport import private_ipc_url, release_ipc

from tests import share

pytestmark = pytest.mark.long(24)

BACKLOGS = [1, 50, 64, 129, 400, 1000]
HELD = 64
"""Frames for which the kernel has room, at least."""
ENGINE = """
    import sys, time
    from hal_engine.reading import OutputReader, SessionLost

    readers = [OutputReader(url, grace=0.1) for url in sys.argv[1:]]
    print(*[reader.url for reader in readers], flush=True)
    first = [reader.read(60) for reader in readers]
    print("met", flush=True)
    sys.stdin.readline()  # the workers are dead
    time.sleep(0.5)
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
            while sink.counters()["queued"]:
                time.sleep(0)
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
        printed = engine.stdout.read().split()
    for url in urls:
        release_ipc(url)
    assert engine.returncode == 0
    counts = list(map(int, printed))
    # Frames that the kernel had no room for are gone with it, also if it closes and cannot wait.
    assert all(min(size, HELD) <= count <= size for count, size in zip(counts, BACKLOGS, strict=True))
