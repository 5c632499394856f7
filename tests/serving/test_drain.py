"""`hal serve` after SIGTERM: requests end within `--drain`, or with an error object; signals that it ignores."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from .conftest import HANGS, begin, post, serving

MESSAGE = "the server is stopping, and its --drain of 0.2 s is over (send the request again later)"
ERROR = {"message": MESSAGE, "type": "service_unavailable", "param": None, "code": "server_stopping"}


def read_to_end(stream):
    """All that comes until the other side closes."""
    text = b""
    while data := stream.recv(65536):
        text += data
    stream.close()
    return text


def read_events(stream, has):
    """Read until the server has sent this text."""
    text = b""
    while has not in text:
        text += stream.recv(65536)


def test_sigterm_lets_running_streams_end_and_takes_nothing_new(monkeypatch):
    """Also where they take longer than a command may otherwise take to end."""
    monkeypatch.setenv("HAL_SECONDS_SIGNAL", "0.01")
    with serving("--slots", "2", "--drain", "60") as served:
        stream = begin(served.url, tokens=300)
        answer = post(served.url, "/v1/completions", prompt="def f(", max_tokens=300, seed=1)
        served.wait_until(lambda: served.metric("num_requests_running") == 2, "the requests do not run")
        served.process.send_signal(signal.SIGTERM)
        assert read_to_end(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        head, _, body = read_to_end(answer).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body)["usage"]["completion_tokens"] > 0
        assert served.process.wait(HANGS) == 128 + signal.SIGTERM
        line = "hal: stopping: 2 requests have 60 s (a second signal ends them now)\n"
        assert served.process.stderr.read() == line
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_what_the_drain_cuts_ends_with_an_error_object(with_template):
    """Streams of completions and chats, of one answer and of several, an answer as a whole, and a body that does not
    come. The engine is stopped in mid-stream, so none of them can end within the drain."""
    completion = {"prompt": "def main(", "max_tokens": 400, "temperature": 1, "stream": True}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "stream": True}
    with serving("--model", str(with_template), "--slots", "8", "--drain", "0.2") as served:
        streams = [
            post(served.url, route, n=n, **body)
            for route, body in (("/v1/completions", completion), ("/v1/chat/completions", chat))
            for n in (1, 3)
        ]
        for stream in streams:
            read_events(stream, b"data: {")
        engine = served.engine()
        os.kill(engine, signal.SIGSTOP)
        answer = post(served.url, "/v1/completions", prompt="x", max_tokens=400)
        half = socket.create_connection(answer.getpeername(), timeout=HANGS)
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        served.wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 200, "reads no request")
        served.process.send_signal(signal.SIGTERM)
        for stream in streams:
            text = read_to_end(stream)
            assert text.endswith(b"\n\n\r\n0\r\n\r\n"), "the stream is not closed in order"
            assert b"[DONE]" not in text
            last = text.rpartition(b"data: ")[2].partition(b"\n")[0]
            assert json.loads(last) == {"error": ERROR}
        for one in (answer, half):
            head, _, body = read_to_end(one).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body) == {"error": ERROR}
        os.kill(engine, signal.SIGCONT)
        assert served.process.wait(HANGS) == 128 + signal.SIGTERM
        first, last = served.process.stderr.read().splitlines()
        assert first.startswith("hal: stopping: 6 requests have 0.2 s (")
        assert last == "hal: 6 requests ended with an error at the end of --drain"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_drain(request, monkeypatch, number):
    """The engine is stopped, and its silence allowed, so the request cannot end by itself."""
    monkeypatch.setenv("HAL_SECONDS_PROCESS_SILENCE", "3600")
    former = signal.signal(number, signal.default_int_handler)  # where pytest ignores it, the server would too
    request.addfinalizer(lambda: signal.signal(number, former))
    with serving("--slots", "2", "--drain", "86400") as served:
        stream = begin(served.url, tokens=400)
        os.kill(served.engine(), signal.SIGSTOP)
        served.process.send_signal(number)
        assert served.process.stderr.readline().startswith("hal: stopping: 1 request has 86400 s (")
        served.process.send_signal(number)
        assert served.process.wait(HANGS) == 128 + number
        stream.close()


def test_an_interrupt_that_was_ignored_stays_so():
    """As in a background job of a shell."""
    with serving(before="trap '' INT") as served:
        status = Path(f"/proc/{served.process.pid}/status").read_text(encoding="ascii")
        (ignored,) = re.findall(r"^SigIgn:\s+(\w+)$", status, re.MULTILINE)
        assert int(ignored, 16) >> (signal.SIGINT - 1) & 1
        served.process.send_signal(signal.SIGINT)
        assert httpx.get(f"{served.url}/health").status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(HANGS) == 128 + signal.SIGTERM
