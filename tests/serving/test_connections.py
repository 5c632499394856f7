"""Connections of clients that send nothing, too slowly or too much, and of those that do not read."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from hal_engine.generation.plan import ModelPlan
from hal_engine.serving import Connection, Gate, Limits, Server, Settings
from hal_engine.serving.gate import Phase
from hal_engine.timeouts import TIMEOUTS
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from uvicorn.server import ServerState

HANGS = 60
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Served:
    """A server of one route: it reads the body, waits for ``free``, and answers with ``answer``."""

    def __init__(self, limits):
        self.gate, self.free, self.left = Gate(limits), asyncio.Event(), asyncio.Event()
        self.arrived, self.answer = asyncio.Event(), b"done"
        self.free.set()
        self.port, self.writers, self.state = 0, [], ServerState()

    async def route(self, request):
        try:
            await request.body()
        except ClientDisconnect:
            self.left.set()
            raise
        self.arrived.set()
        await self.free.wait()
        return PlainTextResponse(self.answer)

    async def open(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def ask(self, data):
        """Open a connection that sends this; return what comes from it."""
        reader, writer = await self.open()
        writer.write(data)
        return reader, writer

    async def until(self, holds):
        """Let the server go on until this holds."""
        async with asyncio.timeout(HANGS):
            while not holds():
                await asyncio.sleep(0)


@asynccontextmanager
async def served(connections=100, held=1 << 20, app=None):
    found = Served(Limits(connections=connections, bytes=held))
    app = app or Starlette(routes=[Route("/", found.route, methods=["GET", "POST"])])
    config = uvicorn.Config(app, log_config=None, ws="none")
    make = partial(Connection, config, found.state, {}, gate=found.gate)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for writer in found.writers:
            writer.transport.abort()
        await found.until(lambda: len(found.gate) == 0)
        assert found.gate.bytes == 0


def run(play):
    async def bounded():
        async with asyncio.timeout(HANGS):
            await play()

    asyncio.run(bounded())


def error_of(data):
    """The status, headers and error of a whole response."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return int(status.split()[1]), dict(line.lower().split(b": ", 1) for line in headers), json.loads(body)["error"]


@pytest.fixture
def short(monkeypatch):
    """Short times for clients."""
    monkeypatch.setattr(TIMEOUTS, "client_look", 0.01)
    for name in ("request_head", "request_body", "unread_answer"):
        monkeypatch.setattr(TIMEOUTS, name, 0.05)


@pytest.mark.parametrize("before", [b"", GET], ids=["at first", "after an answer"])
def test_a_connection_that_sends_nothing_is_closed(short, before):
    async def play():
        async with served() as server:
            reader, _ = await server.ask(before)
            assert (await reader.read()).endswith(b"done" if before else b"")
            await server.until(lambda: len(server.gate) == 0)
            assert server.gate.refused == {"head": 1}

    run(play)


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nConnection: close\r\n"
BODIES = [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"]


@pytest.mark.parametrize("body", BODIES, ids=["with its length", "in chunks"])
@pytest.mark.parametrize("cut", ["", "Host", "\r\n\r\n", "lo"])
def test_a_request_that_offers_an_upgrade_has_its_body(monkeypatch, body, cut):
    """In one part, or two: two requests and a usual one, on one connection."""
    received, parts = Connection.data_received, []
    monkeypatch.setattr(Connection, "data_received", lambda self, data: [parts.append(data), received(self, data)])

    async def echo(request):
        return PlainTextResponse(b"<%b>" % await request.body())

    async def play():
        async with served(app=Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])) as server:
            offer = HEAD.replace(b"Connection: close\r\n", b"") + body
            end = offer.index(cut.encode()) + len(cut)
            reader, writer = await server.ask(offer[:end])
            await server.until(lambda: len(b"".join(parts)) >= end)
            writer.write(offer[end:] + offer + GET + HEAD + body)
            answers = await reader.read()
            assert (answers.count(b"<hello>"), answers.count(b"<>")) == (3, 1)
            assert answers.endswith(b"<hello>")

    run(play)


def test_offers_of_an_upgrade_without_end_are_refused():
    async def play():
        async with served() as server:
            reader, _ = await server.ask(HEAD.replace(b"Connection: close\r\n", b"\r\n") * 1000)
            status, _, error = error_of(await reader.read())
            assert (status, error["message"]) == (400, "Invalid HTTP request received (send HTTP/1.1)")

    run(play)


@pytest.mark.parametrize(
    ("sent", "phase"),
    [
        (b"GET / HT", "head"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", "body"),
    ],
)
def test_half_a_request_ends_with_an_error_object(short, sent, phase):
    async def play():
        async with served() as server:
            reader, _ = await server.ask(sent)
            status, _, error = error_of(await reader.read())
            assert (status, error["code"]) == (408, "request_timeout")
            assert error["message"] == f"the {phase} of the request took more than 0.05 s (send it at once)"
            if phase == "body":
                await server.left.wait()

    run(play)


def test_a_head_that_comes_in_drops_gets_no_more_time(short):
    async def play():
        async with served() as server:
            _, writer = await server.ask(b"GET / HTTP/1.1\r\nX: ")
            with suppress(ConnectionError):
                while not server.gate.refused:
                    writer.write(b"x")
                    await asyncio.sleep(0)
            assert server.gate.refused == {"head": 1}

    run(play)


def test_an_answer_that_nobody_reads_is_given_up(short):
    async def play():
        async with served() as server:
            server.answer = b"x" * (64 << 20)
            _, writer = await server.ask(GET)
            writer.transport.pause_reading()
            await server.until(lambda: len(server.gate) == 0 and server.arrived.is_set())
            assert server.gate.refused == {"unread": 1}

    run(play)


def test_the_connection_that_is_waited_for_longest_makes_room():
    async def play():
        async with served(connections=2) as server:
            first, _ = await server.ask(b"")
            await server.until(lambda: len(server.gate) == 1)
            second, _ = await server.ask(b"")
            await server.until(lambda: len(server.gate) == 2)
            third, _ = await server.ask(GET)
            status, headers, error = error_of(await first.read())
            assert (status, headers[b"retry-after"], error["code"]) == (503, b"1", "server_busy")
            assert error["type"] == "service_unavailable"
            assert b"200 OK" in await third.readuntil(b"done")
            assert server.gate.refused == {"connections": 1}
            assert not second.at_eof()

    run(play)


def test_one_too_many_is_refused_while_all_others_have_their_requests_answered():
    async def play():
        async with served(connections=1) as server:
            server.free.clear()
            first, _ = await server.ask(GET)
            await server.arrived.wait()
            second, _ = await server.open()
            assert error_of(await second.read())[0] == 503
            server.free.set()
            assert b"200 OK" in await first.readuntil(b"done")

    run(play)


def unfinished(size):
    return b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (size + 1) + b" " * size


def test_the_oldest_unfinished_body_makes_room_for_bytes():
    async def play():
        async with served(held=100_000) as server:
            first, _ = await server.ask(unfinished(60_000))
            await server.until(lambda: server.gate.bytes > 60_000)
            second, writer = await server.ask(unfinished(60_000))
            status, headers, error = error_of(await first.read())
            assert (status, headers[b"retry-after"], error["code"]) == (503, b"1", "server_busy")
            writer.write(b" ")
            assert b"200 OK" in await second.readuntil(b"done")
            await server.until(lambda: server.gate.bytes == 0)
            assert server.gate.refused == {"bytes": 1}

    run(play)


def test_bytes_of_requests_that_are_being_answered_keep_further_ones_out():
    async def play():
        async with served(held=100_000) as server:
            server.free.clear()
            first, writer = await server.ask(unfinished(60_000))
            writer.write(b" ")
            await server.arrived.wait()
            second, _ = await server.ask(unfinished(60_000))
            assert error_of(await second.read())[0] == 503
            small, _ = await server.ask(GET)
            server.free.set()
            for one in (first, small):
                assert b"200 OK" in await one.readuntil(b"done")
            await server.until(lambda: server.gate.bytes == 0)

    run(play)


def test_what_is_no_http_is_an_error_object():
    async def play():
        async with served() as server:
            reader, _ = await server.ask(b"nothing\r\n\r\n")
            status, _, error = error_of(await reader.read())
            assert (status, error["type"]) == (400, "invalid_request_error")
            await server.until(lambda: len(server.gate) == 0)

    run(play)


def test_a_head_without_end_is_refused():
    async def play():
        async with served() as server:
            reader, _ = await server.ask(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 16))
            status, _, error = error_of(await reader.read())
            assert (status, error["message"]) == (400, "the head has more than 65536 bytes (send HTTP/1.1)")
            await server.until(lambda: len(server.gate) == 0)

    run(play)


def test_a_head_of_usual_size_may_follow_a_large_body():
    async def play():
        async with served() as server:
            head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n"
            reader, writer = await server.ask(head + b" " * 200_000)
            assert b"200 OK" in await reader.readuntil(b"done")
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"done")

    run(play)


def test_requests_that_come_at_once_are_answered_in_order_and_bounded():
    async def play():
        async with served() as server:
            reader, _ = await server.ask(GET * 16)
            for _ in range(16):
                assert b"200 OK" in await reader.readuntil(b"done")
            server.free.clear()
            server.arrived.clear()
            reader, writer = await server.ask(GET)
            await server.arrived.wait()
            writer.write(GET * 17)
            assert error_of(await reader.read())[0] == 400
            server.free.set()
            await server.until(lambda: not server.state.tasks)

    run(play)


def test_a_client_that_leaves_ends_all_its_requests():
    """Also the first of several, which is being answered."""
    left = []

    async def app(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        left.append(scope["path"])

    async def play():
        async with served(app=app) as server:
            _, writer = await server.ask(GET * 2)
            await server.until(lambda: server.state.tasks)
            writer.close()
            await server.until(lambda: not server.state.tasks)
            assert left == ["/"]

    run(play)


@pytest.mark.parametrize("route", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_within_its_body_is_no_line_of_a_log(route, caplog):
    async def play():
        engine = SimpleNamespace(plan=ModelPlan(None), error=None, lost="", max_model_len=512)
        async with served(app=Server(engine, Settings(model="x")).app()) as server:
            head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode()
            _, writer = await server.ask(head + b"{")
            await server.until(lambda: server.state.tasks)
            writer.close()
            await server.until(lambda: not server.state.tasks)

    run(play)
    assert caplog.records == []


def test_a_request_without_the_key_is_refused_before_its_body_comes():
    async def play():
        engine = SimpleNamespace(plan=ModelPlan(None), error=None, lost="", max_model_len=512)
        async with served(app=Server(engine, Settings(model="x", api_key="secret")).app()) as server:
            head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
            reader, _ = await server.ask(head)
            assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
            await server.until(lambda: server.gate.bytes == 0)

    run(play)


def test_large_bodies_come_piece_by_piece_whoever_else_sends_one():
    """Ten clients send as fast as they are read; of all of them together the loop takes a piece at a time."""
    sent, pieces = [0] * 10, 20

    async def play():
        app = Server(SimpleNamespace(plan=ModelPlan(None), max_model_len=512), Settings(model="x")).app()
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": []}
        scope |= {"app": app, "root_path": "", "server": ("localhost", 80), "scheme": "http"}

        def client(number):
            async def receive():
                sent[number] += 1
                return {"type": "http.request", "body": b" " * (1 << 17), "more_body": sent[number] < pieces}

            async def send(message): ...

            return asyncio.create_task(app(dict(scope), receive, send))

        clients, most = [client(number) for number in range(10)], []
        while sum(sent) < 10 * pieces:
            before = sum(sent)
            await asyncio.sleep(0)
            most.append(sum(sent) - before)
        await asyncio.gather(*clients)
        assert max(most[5:]) <= 2, most
        assert len(set(sent)) == 1

    run(play)


def test_a_fault_of_the_server_is_an_error_object():
    async def ask():
        app = Server(SimpleNamespace(plan=ModelPlan(None)), Settings(model="x")).app()  # an engine without a length
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/v1/models")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["message"].startswith("a fault of the server: AttributeError (")


def test_limits_are_shares_of_the_machine(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 1024) if kind == 7 else (4 << 30, 4 << 30))
    limits = Limits.of_machine()
    assert (limits.connections, limits.bytes) == (768, 32 << 20)
    assert 768 + 4 * limits.burst <= 1024 - 100


def test_whoever_is_waited_for_longest_makes_room_whatever_it_sends():
    """A client whose head is on its way is newer than bodies that come in drops."""

    class Client:
        def __init__(self):
            self.error = None

        def refuse(self, error):
            self.error = error

    async def three():
        gate, clients = Gate(Limits(connections=2, bytes=1 << 20)), [Client(), Client(), Client()]
        gate.enter(clients[0])
        gate.now(clients[0], Phase.BODY)
        gate.enter(clients[1])
        gate.enter(clients[2])
        return [client.error is not None for client in clients]

    assert asyncio.run(three()) == [True, False, False]


def test_a_request_takes_its_turn_once_its_body_has_come():
    """Else those of clients that send half a body would queue before the others."""

    async def play():
        come, taken = asyncio.Event(), []

        async def take():
            taken.append(come.is_set())

        async def receive():
            await come.wait()
            return {"type": "http.request", "body": b'{"prompt":"a"}', "more_body": False}

        async def send(message): ...

        server = Server(SimpleNamespace(plan=ModelPlan(None), max_model_len=512), Settings(model="x"))
        server._turns.take = take
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "root_path": ""}
        scope |= {"headers": [(b"content-length", b"14")], "server": ("localhost", 80), "scheme": "http"}
        running = asyncio.create_task(server.app()(scope, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        come.set()
        await asyncio.gather(running, return_exceptions=True)
        return taken

    assert asyncio.run(play()) == [True]
