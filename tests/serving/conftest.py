"""Servers for tests: `hal serve` in separate processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

HANGS = 120
COMMAND = "from hal.cli import main; main()"


class Served:
    """One server."""

    def __init__(self, process, url):
        self.process, self.url = process, url

    def engine(self):
        """The process id of its engine."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (child,) = (int(one) for task in tasks for one in task.read_text().split())
        return child

    def wait_until(self, holds, what):
        end = time.monotonic() + HANGS
        while not holds():
            assert self.process.poll() is None, f"the server ended: {self.process.returncode}"
            assert time.monotonic() < end, what
            time.sleep(0.05)

    @staticmethod
    def ended(text, reason):
        """Return the number of requests with this end, from /metrics."""
        found = re.search(
            rf'^hal:request_success_total{{[^}}]*finished_reason="{reason}"[^}}]*}} (.*)$', text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    def metric(self, name, headers=None):
        text = httpx.get(f"{self.url}/metrics", headers=headers).text
        return sum(float(value) for value in re.findall(rf"^hal:{name}(?:{{[^}}]*}})? (.*)$", text, re.MULTILINE))


@contextmanager
def serving(*options, until_loaded=True):
    """Start a server, and end it."""
    command = [sys.executable, "-c", COMMAND, "serve", "--device", "cpu", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found is not None, line + process.stderr.read()
        served = Served(process, found[0])
        if until_loaded:
            served.wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200, "the engine did not load")
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(HANGS)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            raise
        finally:
            process.stderr.close()


@pytest.fixture(scope="package")
def server():
    """One server that the tests of the folder share."""
    with serving("--slots", "4", "--max-model-len", "256") as served:
        yield served
