"""Hostile clients against a `hal serve` of its own each, and what another client sees meanwhile.

    python -m tests.serving.hostile              all attacks; --only NAME,NAME some; exit status 1 if one harms

An attack runs in a process of its own until it is killed. Another client's short requests are measured before it,
during it and after it: each ends within 2 s during it, and their median time after it is at most twice that before.
Then the server's memory, descriptors, threads and processes are what they were. Nobody reads its standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
from hal_engine.model import DEFAULT_CHECKPOINT

from .conftest import HANGS, Served, serving

SHORT = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}
MOST, USUAL, NOISE = 2.0, 0.1, 0.25
"""Seconds: of a request during an attack, on a machine where one usually takes so long; a median that is no more than
so much longer after an attack has not changed."""
ROUNDS, SETTLES = 9, 30
MEMORY, OTHERS = 96 << 20, 4
"""Bytes of memory that an allocator may keep, and descriptors, threads and processes that may come and go."""
BODY = 4 << 20
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Where the server is, for an attack."""

    host: str
    port: int

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    def head(self, route: str, length: int, *more: str, host: str | None = None) -> bytes:
        lines = [f"POST {route} HTTP/1.1", f"Host: {host or f'{self.host}:{self.port}'}", f"Content-Length: {length}"]
        return "\r\n".join([*lines, *more, "", ""]).encode()

    async def ask(self, route: str, body: bytes, *more: str, host: str | None = None) -> bytes:
        """Send a request; return the answer's first bytes."""
        reader, writer = await self.open()
        try:
            with suppress(ConnectionError):  # refused before all of it is sent
                writer.write(self.head(route, len(body), *more, host=host) + body)
                await writer.drain()
            return await reader.read(1 << 16)
        finally:
            writer.close()


def with_template_and_pattern(folder: Path) -> Path:
    """Return the folder of a checkpoint whose tokenizer takes time that grows with the square of a text's length."""
    model = folder / "model"
    shutil.copytree(DEFAULT_CHECKPOINT, model)
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "a+b"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"]["pretokenizers"].insert(0, split)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return model


Client = Callable[[Place, int], Awaitable[None]]
"""What one of an attack's clients does again and again; with its number."""


@dataclass(frozen=True)
class Attack:
    """``clients``: how many at once. ``descriptors``: the server's `ulimit -n`. ``model``: a folder's maker."""

    client: Client
    clients: int
    options: tuple[str, ...] = ()
    descriptors: int = 4096
    model: Callable[[Path], Path] | None = None


ATTACKS: dict[str, Attack] = {}


def attack(clients: int, *options: str, **more: object) -> Callable[[Client], Client]:
    def register(client: Client) -> Client:
        ATTACKS[client.__name__] = Attack(client, clients, options, **more)  # type: ignore[arg-type]
        return client

    return register


def completion(**fields: object) -> bytes:
    return json.dumps({**SHORT, **fields}).encode()


# -- attacks ----------------------------------------------------------------------------------------------------------


@attack(3)
async def many_stop_texts(place: Place, number: int) -> None:
    """10,000 of them for eight answers, of which the client reads nothing."""
    texts = [f"stop {one:05}" for one in range(10_000)]
    await place.ask("/v1/completions", completion(stop=texts, n=8, max_tokens=400, ignore_eos=True))


@attack(2, "--slots", "20")
async def as_many_stop_texts_as_may_be(place: Place, number: int) -> None:
    texts = [f"{one:02}" + "a" * 254 for one in range(16)]
    await place.ask("/v1/completions", completion(stop=texts, n=8, max_tokens=400, ignore_eos=True))


@attack(6)
async def long_prompts_abandoned(place: Place, number: int) -> None:
    body = completion(prompt="def f(a, b): return a\n" * (BODY // 22 - 4))
    _, writer = await place.open()
    writer.write(place.head("/v1/completions", len(body)) + body)
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()


@attack(6, model=with_template_and_pattern)
async def prompts_whose_pattern_backtracks(place: Place, number: int) -> None:
    body = completion(prompt="a" * 100_000)
    _, writer = await place.open()
    writer.write(place.head("/v1/completions", len(body)) + body)
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.close()


@attack(1000, descriptors=1024)
async def silent_connections(place: Place, number: int) -> None:
    reader, writer = await place.open()
    with suppress(ConnectionError):
        await reader.read()
    writer.close()
    await asyncio.sleep(0.5)


@attack(400, descriptors=512)
async def heads_in_drops(place: Place, number: int) -> None:
    _, writer = await place.open()
    with suppress(ConnectionError):
        for byte in place.head("/v1/completions", 100, "X: " + "x" * 10_000):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.5)
    writer.close()


@attack(400, descriptors=512)
async def bodies_in_drops(place: Place, number: int) -> None:
    _, writer = await place.open()
    with suppress(ConnectionError):
        writer.write(place.head("/v1/completions", BODY))
        for _ in range(10_000):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.5)
    writer.close()


@attack(100)
async def unfinished_bodies(place: Place, number: int) -> None:
    reader, writer = await place.open()
    with suppress(ConnectionError):
        writer.write(place.head("/v1/completions", BODY) + b" " * (BODY - 1))
        await writer.drain()
        await reader.read()
    writer.close()


@attack(50, descriptors=512)
async def answers_that_nobody_reads(place: Place, number: int) -> None:
    """Requests for the page, one behind the other in one connection."""
    _, writer = await place.open()
    writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket, it can be read from
    page = f"GET / HTTP/1.1\r\nHost: {place.host}\r\n\r\n".encode() * 1000
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(5):
            while True:
                writer.write(page)
                await writer.drain()
    writer.transport.abort()


@attack(20)
async def what_is_no_http(place: Place, number: int) -> None:
    """Each would be a line on a standard error that is full."""
    reader, writer = await place.open()
    with suppress(ConnectionError):
        writer.write(
            b"GET  /\x00 HTTP/9\r\n\r\n"
            if number % 2
            else b"GET / HTTP/1.1\r\nUpgrade: x\r\nConnection: upgrade\r\nHost: localhost\r\n\r\n"
        )
        await reader.read(1 << 16)
    writer.close()


@attack(20)
async def clients_that_leave_in_their_body(place: Place, number: int) -> None:
    _, writer = await place.open()
    writer.write(place.head("/v1/completions", 1000) + b"{")
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.close()


@attack(20)
async def web_pages(place: Place, number: int) -> None:
    """Of a foreign host, of another origin, and one that asks nobody: none reaches the engine."""
    body = completion(prompt=[1] * 50, n=8, max_tokens=400, ignore_eos=True)
    origin = f"Origin: http://{place.host}:{place.port}"
    answers = [
        await place.ask("/v1/completions", body, host="rebound.example"),
        await place.ask("/v1/completions", body, "Origin: https://page.example", "Content-Type: application/json"),
        await place.ask("/v1/completions", body, origin, "Content-Type: text/plain"),
    ]
    for answer, status in zip(answers, (b"403", b"403", b"415"), strict=True):
        assert answer.split(b" ", 2)[1] == status, answer[:200]


CHAT = b'{"messages":[%s],"max_tokens":4}'
MESSAGE = b'{"role":"user","content":""}'


@attack(4, model=with_template_and_pattern)
async def giant_chats(place: Place, number: int) -> None:
    """The most that there can be in a body, and the most that is taken."""
    for messages in (BODY // (len(MESSAGE) + 1) - 2, 4096):
        await place.ask("/v1/chat/completions", CHAT % b",".join([MESSAGE] * messages))


@attack(4)
async def giant_bodies(place: Place, number: int) -> None:
    """A name, lists, numbers and texts; each as many as a body may have bytes for."""
    room = BODY - 100
    for more in (
        b'"' + b"a" * room + b'":1',
        b'"prompt":[' + b"[]," * (room // 3) + b"[]]",
        b'"prompt":[' + b"1," * (room // 2) + b"1]",
        b'"prompt":[' + b'"",' * (room // 3) + b'""]',
        b'"user":"' + b",{" * (room // 2) + b'"',
        b'"metadata":{' + b",".join(b'"%d":1' % one for one in range(room // 11)) + b"}",
    ):
        await place.ask("/v1/completions", b'{"max_tokens":1,' + more + b"}")


async def attacking(name: str, place: Place) -> None:
    """Run an attack's clients until the process is killed; say when they have begun."""
    chosen = ATTACKS[name]

    async def go_on(number: int) -> None:
        while True:
            with suppress(ConnectionError):
                await chosen.client(place, number)
            await asyncio.sleep(0)  # also if the server lets none in

    tasks = [asyncio.create_task(go_on(number)) for number in range(chosen.clients)]
    await asyncio.sleep(1.0)
    print("begun", flush=True)
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


# -- judgement --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """What a process has."""

    memory: int
    descriptors: int
    threads: int
    children: int

    @classmethod
    def of(cls, process: int) -> Look:
        folder = Path(f"/proc/{process}")
        pages = int((folder / "statm").read_text(encoding="ascii").split()[1])
        tasks = [*(folder / "task").iterdir()]
        children = sum(len((task / "children").read_text(encoding="ascii").split()) for task in tasks)
        memory = pages * os.sysconf("SC_PAGE_SIZE")
        return cls(memory, len(os.listdir(folder / "fd")), len(tasks), children)

    def is_as(self, before: Look) -> bool:
        """Whether nothing has grown."""
        grown = (self.descriptors - before.descriptors, self.threads - before.threads, self.children - before.children)
        return self.memory <= before.memory + MEMORY and max(grown) <= OTHERS


def fill(served: Served) -> None:
    """Fill the pipe of the server's standard error, of which nobody reads."""
    descriptor = os.open(f"/proc/{served.process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    for size in (1 << 16, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(descriptor, b"." * size)
    os.close(descriptor)


def timed(served: Served) -> float:
    """Seconds of a short request, with a connection of its own."""
    began = time.monotonic()
    answer = httpx.post(f"{served.url}/v1/completions", json=SHORT, timeout=HANGS)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def usual(served: Served) -> list[float]:
    """The same, before an attack, once the server has all the threads that it keeps."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: timed(served), range(48)))
    return [timed(served) for _ in range(ROUNDS)]


def within(before: list[float]) -> float:
    """Seconds in which a request ends during an attack, on a machine as slow as this one is now."""
    return MOST * max(1.0, median(before) / USUAL)


@contextmanager
def attacker(name: str, served: Served) -> Iterator[None]:
    """Inside, the attack goes on."""
    where = urlsplit(served.url)
    command = [sys.executable, "-m", "tests.serving.hostile", "--attack", name, where.hostname, str(where.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            assert process.stdout.readline() == b"begun\n"
            yield
            assert process.poll() is None, "the attack itself has failed"
        finally:
            process.kill()


def settled(served: Served, before: Look) -> None:
    """Wait until the server is as it was."""
    end = time.monotonic() + SETTLES
    while not (now := Look.of(served.process.pid)).is_as(before):
        assert time.monotonic() < end, f"{now} after {before}"
        time.sleep(0.2)


def judge(name: str) -> str:
    """Run an attack; return the times of another client in words. Raises AssertionError if the attack harms."""
    chosen = ATTACKS[name]
    with ExitStack() as stack:
        options = list(chosen.options)
        if chosen.model is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            options += ["--model", str(chosen.model(Path(folder)))]
        served = stack.enter_context(
            serving(*options, before=f"ulimit -n {chosen.descriptors}" * bool(chosen.descriptors))
        )
        fill(served)
        before = usual(served)
        looked, during = Look.of(served.process.pid), []
        with attacker(name, served):
            for _ in range(ROUNDS):
                during.append(timed(served))
                time.sleep(0.2)
            height = Look.of(served.process.pid)
        after = [timed(served) for _ in range(ROUNDS)]
        summary = (
            f"{median(before):.3f} s before, {max(during):.3f} s at most during, {median(after):.3f} s after; {height}"
        )
        assert max(during) <= within(before), summary
        assert median(after) <= max(2 * median(before), median(before) + NOISE), summary
        settled(served, looked)
        return summary


def judge_a_stopped_engine() -> str:
    """The engine process is stopped: within 10 s the server says so, and keeps nobody waiting from then on."""
    with serving() as served:
        before = usual(served)
        os.kill(served.engine(), signal.SIGSTOP)
        began = time.monotonic()
        while httpx.get(f"{served.url}/health", timeout=HANGS).status_code == 200:
            noticed = time.monotonic() - began
            assert noticed <= 10 * within(before) / MOST, "a stopped engine process is not noticed"
            time.sleep(0.1)
        noticed, began = time.monotonic() - began, time.monotonic()
        answer = httpx.post(f"{served.url}/v1/completions", json=SHORT, timeout=HANGS)
        seconds = time.monotonic() - began
        assert (answer.status_code, seconds <= within(before)) == (503, True), (answer.text, seconds)
        return f"noticed after {noticed:.1f} s, then refused within {seconds:.3f} s"


def main() -> int:
    """Run all attacks, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--attack", nargs=3, metavar=("NAME", "HOST", "PORT"), help="(for the script itself)")
    given = parser.parse_args()
    if given.attack:
        name, host, port = given.attack
        asyncio.run(attacking(name, Place(host, int(port))))
    harmed = 0
    for name in given.only.split(",") if given.only else [*ATTACKS, "stopped_engine"]:
        try:
            summary = judge_a_stopped_engine() if name == "stopped_engine" else judge(name)
        except (AssertionError, httpx.HTTPError) as error:
            summary, harmed = f"HARMED: {error!r}", harmed + 1
        print(f"{name}: {summary}", flush=True)
    return min(harmed, 1)


if __name__ == "__main__":
    sys.exit(main())
