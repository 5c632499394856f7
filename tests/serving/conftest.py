"""Servers for tests: `hal serve` in separate processes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hal_engine.model import DEFAULT_CHECKPOINT

HANGS = 120
COMMAND = "from hal.cli import main; main()"


@pytest.fixture(scope="package", autouse=True)
def no_authorities():
    """All requests stay on this machine, and httpx takes long to read the internet's authorities for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(Path(__file__).parent))
        yield


class Served:
    """One server."""

    def __init__(self, process, line, url):
        """``line``: the first that it prints."""
        self.process, self.line, self.url = process, line, url

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
def serving(*options, until_loaded=True, lines=None, before=""):
    """Start a server, and end it. ``lines``: a list for the lines before that of its address. ``before``: what a shell
    does first, if any."""
    shell = ["sh", "-c", f'{before} && exec "$@"', "sh"] if before else []
    command = [*shell, sys.executable, "-c", COMMAND, "serve", "--device", "cpu", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        while lines is not None and line and "http://" not in line:
            lines.append(line)
            line = process.stderr.readline()
        if (found := re.search(r"http://\S+:\d+", line)) is None:
            process.kill()
            raise AssertionError(line + process.stderr.read())
        served = Served(process, line, found[0])
        if until_loaded:
            assert process.stderr.readline() == f"hal: ready on {served.url}\n"
            assert httpx.get(f"{served.url}/health").status_code == 200
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


def post(url, route, *, receive_buffer=0, **body):
    """Send a request by hand; return its socket. ``receive_buffer``: at most so many bytes wait in it, if not 0."""
    where = urlsplit(url)
    data = json.dumps(body).encode()
    found = socket.socket()
    if receive_buffer:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # before it connects
    found.settimeout(HANGS)
    found.connect((where.hostname, where.port))
    found.sendall(f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return found


def begin(url, *, tokens):
    """Open a stream by hand; a socket of which the first event was read."""
    found = post(url, "/v1/completions", prompt="def main(", max_tokens=tokens, temperature=0, stream=True)
    data = b""
    while b"data: {" not in data:
        data += found.recv(65536)
    return found


@pytest.fixture(scope="package")
def with_template(tmp_path_factory):
    """The shipped checkpoint with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, path)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    return path


@pytest.fixture(scope="package")
def server():
    """One server that the tests of the folder share."""
    with serving("--slots", "4", "--max-model-len", "256") as served:
        yield served
