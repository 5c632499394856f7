"""`hal serve` and clients that leave, or that read slowly."""

import json
import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from .conftest import HANGS, post, serving


def test_a_request_ends_by_the_second_step_after_its_client_left(monkeypatch, tmp_path):
    """Steps run one by one. The end of the connection is read while a step is in flight, and the only slot has the
    request of another client in the next step but one at the latest."""
    monkeypatch.setenv("HELD_STEPS", str(tmp_path))
    monkeypatch.setenv("HAL_SECONDS_STATS", "1e-9")  # with each step
    monkeypatch.chdir(os.path.dirname(__file__))
    os.mkfifo(tmp_path / "permits")
    permits = os.open(tmp_path / "permits", os.O_RDWR)
    launched = lambda: (tmp_path / "steps").read_text(encoding="utf-8").splitlines()  # noqa: E731
    body = {"prompt": "x", "stream": True}

    def step():
        before = len(launched())
        os.write(permits, b".")
        served.wait_until(lambda: len(launched()) > before, "no step is launched")

    with serving("--slots", "1", "--max-model-len", "256", "--runner", "held_steps:HeldRunner") as served:
        leaves = post(served.url, "/v1/completions", max_tokens=200, **body)
        served.wait_until(lambda: (tmp_path / "steps").exists(), "no step is launched")
        stays = post(served.url, "/v1/completions", max_tokens=3, **body)
        while served.metric("num_requests_waiting") < 1:
            step()
        in_flight = len(launched())
        assert set(launched()) == {"1"}
        leaves.close()
        aborted = lambda: served.ended(httpx.get(f"{served.url}/metrics").text, "abort") == 1  # noqa: E731
        served.wait_until(aborted, "the end of the connection is not read")
        assert len(launched()) == in_flight
        os.write(permits, b"a*")
        text = b""
        while b"[DONE]" not in text:
            text += stays.recv(65536)
        stays.close()
        later = launched()[in_flight:]
        assert "2" in later[:2], later
        assert "1" not in later[1:], later
    os.close(permits)


def in_kernel(stream):
    """Bytes that the kernel holds for a connection: those that its server has sent and its client has not read."""
    ours, theirs = (f"{port:04X}" for port in (stream.getsockname()[1], stream.getpeername()[1]))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()]
    ends = {(row[1][-4:], row[2][-4:]): row[4].split(":") for row in rows[1:]}
    return int(ends[theirs, ours][0], 16) + int(ends[ours, theirs][1], 16)


def resident(process):
    """Bytes of a process."""
    return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


CHOICES, TOKENS, ROUTE = 14, 240, "/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "def f("}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
    "temperature": 1,
}


def unread(served):
    """A stream, larger than all buffers of its connection, of which nothing is read."""
    slow = post(served.url, ROUTE, receive_buffer=4096, n=CHOICES, stream=True, **BODY)
    served.wait_until(lambda: served.metric("num_requests_running") == CHOICES, "the request does not run")
    return slow


@pytest.mark.conform
def test_a_slow_reader_delays_nobody_and_fills_no_memory(with_template):
    """It reads nothing of an answer until the engine ended it."""
    with serving("--model", str(with_template), "--slots", "16", "--max-model-len", "256") as served:
        few = BODY | {"max_tokens": 2}
        ask = lambda: httpx.post(f"{served.url}{ROUTE}", json=few, timeout=HANGS)  # noqa: E731
        assert ask().status_code == 200
        memory = resident(served.process.pid)
        slow = unread(served)
        assert [ask().status_code for _ in range(4)] == [200] * 4
        served.wait_until(lambda: served.metric("request_success_total") == 1 + CHOICES + 4, "its slots are not free")
        grown, held = resident(served.process.pid) - memory, in_kernel(slow)
        text = b""
        while not text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            text += slow.recv(1 << 20)
        slow.close()
    print(f"{len(text)} bytes, of which {held} in the kernel; the server has grown by {grown} bytes")
    events = [json.loads(found) for found in re.findall(rb"^data: ({.*)$", text, re.MULTILINE)]
    tokens = [len((choice["logprobs"] or {"content": ()})["content"]) for one in events for choice in one["choices"]]
    assert sum(tokens) == CHOICES * TOKENS
    assert len(text) > held + 1_000_000, "the connection's buffers were not full"
    assert grown < 20_000_000


@pytest.mark.conform
def test_a_stream_that_nobody_reads_is_cut_off_after_the_drain(with_template):
    """No error object reaches its client: the command prints that the stream was cut off, and ends."""
    options = ("--slots", "16", "--max-model-len", "256", "--drain", "0.2")
    with serving("--model", str(with_template), *options) as served, unread(served):
        served.wait_until(lambda: served.metric("request_success_total") == CHOICES, "its slots are not free")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(HANGS) == 128 + signal.SIGTERM
        first, last = served.process.stderr.read().splitlines()
        assert first.startswith("hal: stopping: 1 request has 0.2 s (")
        assert last == "hal: a stream was cut off at the end of --drain"
