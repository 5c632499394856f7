"""No body and no headers cause a fault of the server, or a slot that remains taken."""

import asyncio
import json
import socket
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
from hal_engine.generation.plan import ModelPlan
from hal_engine.serving import Server, Settings
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import share

from .conftest import HANGS

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(
    ["n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "stream", "user", "priority"]
)


@given(st.dictionaries(NAMES, VALUES, max_size=3), VALUES | st.just("x"))
def test_no_body_gives_a_fault_of_the_server(server, fields, prompt):
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    if isinstance(body.get("n"), int) and body["n"] > 4:
        body["n"] = 4
    answer = httpx.post(f"{server.url}/v1/completions", content=json.dumps(body), timeout=HANGS)
    assert answer.status_code in (200, 400), answer.text


BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
KNOWN = st.sampled_from(
    b"Accept Authorization Connection Content-Encoding Content-Type Cookie Expect Host Keep-Alive Origin Range Upgrade "
    b"X-Forwarded-For Last-Event-ID HTTP2-Settings".split()
)
USUAL = st.sampled_from(
    [b"close", b"keep-alive", b"websocket", b"h2c", b"gzip", b"100-continue", b"bytes=0-", b"*/*", b"-1"]
)
WORDS = USUAL | st.binary(max_size=20).map(lambda text: text.replace(b"\n", b"").replace(b"\r", b""))
HEADERS = st.lists(
    st.tuples(KNOWN | st.binary(max_size=10).map(lambda text: text.replace(b"\n", b"")), WORDS), max_size=4
)
LENGTHS = st.sampled_from(
    [None, None, None, b"Content-Length: -1", b"Content-Length: 1e3", b"Content-Length: 9" * 9]
) | (
    st.sampled_from(
        [b"Content-Length: 3", b"Content-Length: 4000", b"Transfer-Encoding: chunked", b"Transfer-Encoding: x"]
    )
)


def statuses_of(url, headers, length, path):
    """Send a request by hand, and read to the end of the connection; return the answer."""
    where = urlsplit(url)
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: localhost", *(name + b": " + value for name, value in headers)]
    lines += [length or b"Content-Length: %d" % len(BODY), b"Connection: close", b"", BODY]
    with socket.create_connection((where.hostname, where.port), timeout=HANGS) as client:
        client.sendall(b"\r\n".join(lines))
        if length is not None:  # the server may wait for more
            client.shutdown(socket.SHUT_WR)
        data = b""
        while part := client.recv(65536):
            data += part
    answers = [line for line in data.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [int(line.split()[1]) for line in answers]


@settings(max_examples=share.of(300), deadline=None)
@given(HEADERS, LENGTHS, st.sampled_from([b"/v1/completions", b"/tokenize", b"/health", b"/%00", b"/v1/models?x=%ff"]))
def test_no_headers_give_a_fault_of_the_server(server, headers, length, path):
    assert all(status < 500 for status in statuses_of(server.url, headers, length, path))


def test_no_slot_stays_taken_behind_the_others(server):
    idle = lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0  # noqa: E731
    server.wait_until(idle, "a slot stays taken")
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=HANGS)
    assert answer.status_code == 200


@settings(max_examples=share.of(300), deadline=None)
@given(st.lists(st.binary(max_size=20) | st.sampled_from([b"Bearer", b"Bearer  ", b"bearer secre"]), max_size=3))
def test_no_other_key_is_taken(values):
    async def ask():
        engine = SimpleNamespace(plan=ModelPlan(None), error=None, lost="", stats=None)
        transport = httpx.ASGITransport(Server(engine, Settings(model="x", api_key="secret")).app())
        headers = [(b"Authorization", value) for value in values]
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/metrics", headers=headers)).status_code

    assert asyncio.run(ask()) == 401
