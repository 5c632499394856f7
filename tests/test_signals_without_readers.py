"""SIGINT and SIGTERM to commands without a reader, or without input so far: they end all the same."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest

from .commands import LIBRARIES, check_end, left_in, start

pytestmark = pytest.mark.long(12)
WARM = LIBRARIES


def reading_nothing(folder, *arguments, warm=None):
    """A command with a standard output that is full and unread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    process = start(folder, *arguments, stdout=writing, warm=warm)
    os.close(writing)
    return process, reading


def test_a_run_whose_output_nobody_reads_ends_all_the_same(tmp_path, warm):
    number = signal.SIGTERM
    process, reading = reading_nothing(
        tmp_path, "run", "--prompt", "def f(", "--temperature=0", "--max-tokens", "4", warm=warm
    )
    tasks = Path(f"/proc/{process.pid}/task")
    while not any("pipe" in (task / "wchan").read_text() for task in tasks.iterdir()):  # until it waits for its reader
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    os.close(reading)
    check_end(process.returncode, "", err, number)
    assert left_in(tmp_path) == []


SENDING = """
    import sys
    import numpy as np
    from hal_core.output.records import OutputRecord
    from hal_engine.transport import open_sink

    class Output:
        step = 0
        def resolve(self):
            one = np.ones(1, np.uint8)
            return OutputRecord(0, ("req",), one, one, np.array([0]), one.astype("i4"), np.array([7]), one < 0)
        def complete(self, error):
            pass

    sink = open_sink(sys.argv[1], heartbeat=0.05)
    sink.put(Output())
    sink.close(60)
"""


def test_a_tail_whose_output_nobody_reads_ends_and_the_record_comes_again(tmp_path):
    url = f"ipc://{tmp_path}/socket"
    process, reading = reading_nothing(tmp_path, "tail", url)
    worker = start(tmp_path, url, code=textwrap.dedent(SENDING))
    stuck = Path(f"/proc/{process.pid}/wchan")
    while "pipe" not in stuck.read_text():  # until it waits for its reader
        assert process.poll() is None
        assert worker.poll() is None, worker.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    os.close(reading)
    check_end(process.returncode, "", err, signal.SIGTERM)
    again = start(tmp_path, "tail", url, "--timeout", "60")
    out, _ = again.communicate(timeout=120)
    worker.communicate(timeout=60)
    assert worker.returncode == 0
    assert "req  at 0: 7" in out


def test_a_tail_that_listens_is_ended_by_an_interrupt_with_its_counts(tmp_path):
    process = start(tmp_path, "tail", f"ipc://{tmp_path}/socket")
    while not (tmp_path / "socket").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert err.startswith("hal tail: 0 frames")
    assert not (tmp_path / "socket").exists()
