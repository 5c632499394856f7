"""What a streamed token costs the HTTP process of ``hal serve``, beside a loop that writes the same bytes; no device.

    python benchmarks/events.py [--rounds N] [--loads STREAMSxSTEPS,…] [--tokens N] [WAY …]

Prints microseconds of processor time a token, medians of rounds in which the ways take turns:

- bare: a bare asyncio loop, one write of an event's bytes a token.
- serve: ``hal serve`` with its own engine process, whose engine is a stand-in: hal's loop, channel and sink, and steps
  that only make records. h11: the same app behind uvicorn's h11.
- engine: AsyncEngine alone, a task for each stream.

Processor time is counted from the quiet before the first step to the last end. A machine with other work shows ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from run import installed, versions

WAYS = ("bare", "serve", "h11", "engine")
GOALS = {
    ("serve", 300): 2.0,
    ("h11", 300): 2.5,
    ("serve", 50): 3.2,
}
"""Most times the bare loop's, at 128 streams and so many steps a second."""
QUIET = 0.4
"""Seconds without a new request before the first step."""
SLOTS = 256
TEXT = (
    "def main(folder):\n    names = sorted(path.name for path in folder.iterdir())\n    return {'size': len(names)}\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-%s","created":1764383000,"model":"default","object":"text_completion","choices":[{"index":0,'
    b'"text":" name","logprobs":null,"finish_reason":null}],"usage":null}\n\n' % (b"0" * 32)
)


class StandIn:
    """An engine whose steps only make records. A request's priority is the steps a second, 0 for as many as go."""

    preemptions, lost, drafts, spent = 0, "", (0, 0, 0), (None, None)

    def __init__(self, take: Callable[[Any], object], sink: Any, ids: list[int]) -> None:  # noqa: ANN401
        self._take, self._sink, self._ids = take, sink, np.array(ids * 2)
        self._running: dict[str, list[int]] = {}
        self._arrived, self._due, self._steps = 0.0, 0.0, 0
        self._names: tuple[str, ...] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def load(self) -> tuple[int, int, float]:
        return len(self._running), 0, 0.0

    def submit_all(self, requests: list[Any]) -> None:
        for one in requests:
            begin = int(one.request_id[1:]) * 7 % (len(self._ids) // 2)
            self._running[one.request_id] = [0, one.params.max_tokens, begin, one.priority]
            self._arrived, self._names = time.monotonic(), None

    def abort(self, name: str) -> None:
        if self._running.pop(name, None):
            self._names = None

    def stop(self) -> None: ...

    def step(self) -> list[Any]:
        from hal_core import FinishReason, OutputRecord, SlotStatus

        now = time.monotonic()
        if not self._running or now < self._arrived + QUIET:
            time.sleep(0.002)
            return []
        if self._names is None:
            self._names, rows = tuple(self._running), list(self._running.values())
            self._position, self._most, self._begin = (np.array([row[at] for row in rows]) for at in range(3))
            self._rate, self._due = rows[0][3], now
        if self._rate:
            time.sleep(max(0.0, self._due - now))
            self._due += 1 / self._rate
        self._steps += 1
        count, position = len(self._names), self._position.copy()
        ends = position + 1 >= self._most
        pending = SimpleNamespace(step=self._steps, complete=lambda error: None)
        self._sink.put(pending)
        self._take(
            OutputRecord(
                self._steps,
                self._names,
                np.full(count, SlotStatus.TOKEN, np.uint8),
                np.where(ends, np.uint8(FinishReason.LENGTH), np.uint8(0)),
                position,
                np.ones(count, np.int32),
                self._ids[(self._begin + position) % (len(self._ids) // 2)],
                position == 0,
            )
        )
        self._position += 1
        if ends.any():
            for name, end, done in zip(self._names, ends.tolist(), self._position.tolist(), strict=True):
                self._running[name][0] = done
                if end:
                    del self._running[name]
            self._names = None
        return []


def engine_process() -> None:
    """hal's engine process with the stand-in."""
    from hal_engine.engine.handed import HandedSink
    from hal_engine.generation import process
    from hal_engine.generation.plan import ModelPlan

    ids = ModelPlan(None).tokenizer.encode(TEXT * 3)

    @contextmanager
    def opened(_setup: object, on_record: Callable[[Any], object]) -> Iterator[Any]:
        sink = HandedSink()
        sink.to = on_record
        device = SimpleNamespace(name="stand-in", capabilities=SimpleNamespace(fallbacks={}, substituted=""))
        yield SimpleNamespace(engine=StandIn(sink.take, sink, ids), device=device)

    process.open_engine = opened  # type: ignore[assignment]
    process.main()


# -- servers ----------------------------------------------------------------------------------------------------------


class Bare(asyncio.Protocol):
    """A head and an event a step, each one write: as little Python as asyncio allows."""

    streams: list[asyncio.Transport] = []  # noqa: RUF012 (of the process)
    arrived, wanted = 0.0, {"priority": 0, "max_tokens": 0}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        if not data.startswith(b"POST"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return
        Bare.wanted, Bare.arrived = json.loads(data.partition(b"\r\n\r\n")[2]), time.monotonic()
        Bare.streams.append(self._transport)


async def serve_bare(port: int) -> None:
    """The floor."""
    await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", port, backlog=2048)
    event = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
    while True:
        await asyncio.sleep(0.01)
        if not Bare.streams or time.monotonic() < Bare.arrived + QUIET:
            continue
        writes, due, rate = [one.write for one in Bare.streams], time.monotonic(), Bare.wanted["priority"]
        Bare.streams.clear()
        for write in writes:
            write(HEAD)
        for _ in range(Bare.wanted["max_tokens"]):
            for write in writes:
                write(event)
            due += 1 / rate if rate else 0.0
            await asyncio.sleep(max(0.0, due - time.monotonic()) if rate else 0)
        for write in writes:
            write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def run_engine() -> None:
    """For each line of input run that many streams; print microseconds a token and how many tokens."""
    async with stand_in() as engine:
        print("up", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            streams, tokens, rate = map(int, line.split())
            begun: list[float] = []

            async def stream(tokens: int = tokens, rate: int = rate, begun: list[float] = begun) -> int:
                total = 0
                async for part in engine.generate([1, 2, 3], {"max_tokens": tokens, "ignore_eos": True}, priority=rate):
                    if not begun:
                        begun.append(time.process_time())
                    total += len(part.token_ids)
                return total

            total = sum(await asyncio.gather(*(stream() for _ in range(streams))))
            print((time.process_time() - begun[0]) / total * 1e6, total, flush=True)


def stand_in() -> Any:  # noqa: ANN401 (an AsyncEngine)
    """AsyncEngine, whose process has the stand-in."""
    from hal_engine.generation import AsyncEngine
    from hal_engine.generation.plan import ModelPlan
    from hal_engine.options import engine_options

    plan = ModelPlan(None)
    return AsyncEngine.of(plan, plan.serve(engine_options({"device": "cpu", "slots": SLOTS})), SLOTS)


def serve(way: str, port: int) -> None:
    """A way in this process."""
    if way == "bare":
        asyncio.run(serve_bare(port))
        return
    from hal_engine.children import TIED
    from hal_engine.generation import link

    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import events; events.engine_process()"
    link._CHILD = TIED + here
    if way == "engine":
        asyncio.run(run_engine())
    elif way == "h11":
        import uvicorn
        from hal_engine.serving import Server, Settings

        app = Server(stand_in(), Settings(model="default")).app()
        options: dict[str, Any] = {"access_log": False, "log_level": "warning", "server_header": False}
        uvicorn.run(app, host="127.0.0.1", port=port, http="h11", loop="asyncio", lifespan="on", **options)
    else:
        from hal.cli import main as hal

        sys.argv = ["hal", "serve", "--device", "cpu", "--port", str(port), "--slots", str(SLOTS)]
        hal()


# -- measurement ------------------------------------------------------------------------------------------------------


def clock(process: int) -> float:
    """Processor seconds of another process."""
    return time.clock_gettime((~process << 3) | 2)


def child_of(process: int) -> int | None:
    """The engine process of a server."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return next((int(kids[0]) for task in tasks if (kids := (task / "children").read_text().split())), None)


@contextmanager
def started(way: str, port: int) -> Iterator[Any]:
    """A process of a way, once it answers."""
    command = [sys.executable, __file__, "--serve", way, "--port", str(port)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True} if way == "engine" else {}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
    try:
        if way == "engine":
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        while way != "engine":
            assert process.poll() is None, f"{way} has ended"
            time.sleep(0.1)
            try:
                with socket.create_connection(("127.0.0.1", port), 2) as one:
                    one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    if b" 200 " in one.recv(4096):
                        break
            except OSError:
                continue
        yield process
    finally:
        process.terminate()
        process.wait()


def drive(process: Any, port: int, streams: int, tokens: int, rate: int) -> dict[str, float]:  # noqa: ANN401
    """Run streams to their ends over raw sockets."""
    wanted = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True, "priority": rate}
    body = json.dumps(wanted).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    answers, selector = [bytearray() for _ in range(streams)], selectors.DefaultSelector()
    child, gaps, last, first, left = child_of(process.pid), list[float](), dict[int, float](), 0.0, streams
    with ExitStack() as stack:
        for index in range(streams):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            one.sendall(head + body)
            selector.register(one, selectors.EVENT_READ, index)
        time.sleep(QUIET / 2)
        before, engine_before = clock(process.pid), clock(child) if child else 0.0
        while left:
            ready = selector.select(20)
            assert ready, f"silent: {bytes(answers[0][-300:])!r}"
            now = time.monotonic()
            first = first or now
            for key, _ in ready:
                data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
                answers[key.data] += data
                if key.data in last:
                    gaps.append(now - last[key.data])
                last[key.data] = now
                if not data or answers[key.data].endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
                    left -= 1
        seconds, spent = time.monotonic() - first, clock(process.pid) - before
        engine = clock(child) - engine_before if child else 0.0
    assert all(b"data: [DONE]" in one[-40:] for one in answers), bytes(answers[0][-300:])
    total = streams * tokens
    return {
        "us": spent / total * 1e6,
        "engine_us": engine / total * 1e6,
        "tokens_s": total / seconds,
        "gap_ms": sorted(gaps)[int(0.99 * len(gaps))] * 1e3 if gaps else 0.0,
        "events": sum(one.count(b"data: {") for one in answers) / total,
    }


def drive_engine(process: Any, streams: int, tokens: int, rate: int) -> dict[str, float]:  # noqa: ANN401
    """The same of AsyncEngine alone."""
    child, began = child_of(process.pid), time.monotonic()
    assert child is not None
    before = clock(child)
    process.stdin.write(f"{streams} {tokens} {rate}\n")
    process.stdin.flush()
    us, total = map(float, process.stdout.readline().split())
    seconds = time.monotonic() - began - QUIET
    engine = (clock(child) - before) / total * 1e6
    return {"us": us, "engine_us": engine, "tokens_s": total / seconds, "gap_ms": 0.0, "events": 0.0}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="128x300,128x50")
    parser.add_argument("--tokens", type=int, default=0, help="of each stream; as many as come in 1.5 s")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=20000 + os.getpid() % 10000, help="the first of several")
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve, chosen.port)
        return
    packages = ", ".join(f"{name} {installed(name)}" for name in ("uvicorn", "httptools", "starlette", "msgspec"))
    print(f"{versions()}; {packages}; {chosen.rounds} rounds; us of processor time a token\n")
    print("| streams, steps/s | way | us | of bare | goal | engine process, us | tokens/s | gap p99, ms | events |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    with ExitStack() as stack:
        ports = {way: chosen.port + number for number, way in enumerate(chosen.ways)}
        running = {way: stack.enter_context(started(way, port)) for way, port in ports.items()}
        for load in chosen.loads.split(","):
            streams, rate = map(int, load.split("x"))
            tokens, found = chosen.tokens or max(60, 3 * rate // 2), {way: list[dict[str, float]]() for way in running}
            for number in range(chosen.rounds):
                for way in list(running)[:: -1 if number % 2 else 1]:
                    process = running[way]
                    if way == "engine":
                        found[way].append(drive_engine(process, streams, tokens, rate))
                    else:
                        found[way].append(drive(process, ports[way], streams, tokens, rate))
            shown(streams, rate, found)


def shown(streams: int, rate: int, found: dict[str, list[dict[str, float]]]) -> None:
    """Print the rows of a load."""
    for way, turns in found.items():
        one = {name: median(turn[name] for turn in turns) for name in turns[0]}
        ratio, goal = "", ""
        if "bare" in found and way not in ("bare", "engine"):
            ratio = f"{median(turn['us'] / bare['us'] for turn, bare in zip(turns, found['bare'], strict=True)):.2f}"
            goal = f"{GOALS[way, rate]}" if streams == 128 and (way, rate) in GOALS else ""
        row = f"| {streams}, {rate} | {way} | {one['us']:.1f} | {ratio} | {goal} | {one['engine_us']:.1f} | "
        print(row + f"{one['tokens_s']:.0f} | {one['gap_ms']:.1f} | {one['events']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
