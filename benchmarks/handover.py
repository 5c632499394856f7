"""A request's keys and values between two processes, from the seal to the insertion, against the raw copy of the bytes.

512 tokens in blocks of 16 of the embedded checkpoint's cache. Ways, of which short rounds are interleaved in one run:

- raw: the bytes of the blocks as one message over the same transport, from before it is sent until it has come;
- whole: all blocks and the seal at once, as of a prompt of one chunk, until the request is in its slot;
- last chunk: the same of the last quarter of the prompt, when the others have gone before.

Then whole once more while the decode side runs steps of its model, and while the prefill side does. Both clocks are the
machine's monotonic one. python benchmarks/handover.py [rounds]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

if TYPE_CHECKING:
    from hal_core import AdmittedRequest

TOKENS, SIZE, CHUNKS, ROWS = 512, 16, 4, 8
COUNT = TOKENS // SIZE
LIMIT = 5.0
"""Milliseconds beyond the raw copy at most."""
Ways = dict[str, list[float]]


class Worker:
    """A model with its cache, a state and a transfer; the base of both sides."""

    def __init__(self, pipe: Pipe, url: str | None) -> None:
        from hal_core import StateConfig

        from hal.handover import open_transfer
        from hal.handover.cache import Identity, PagedBlocks
        from hal.model import DEFAULT_CHECKPOINT
        from hal.model.llama import LlamaModel
        from hal.opening import open_device
        from hal.transport.curve import CurveKeys

        self.pipe, self.keys = pipe, None if url is None else CurveKeys.new()
        self.model = LlamaModel.load(DEFAULT_CHECKPOINT)
        self.model.allocate_cache(4 * COUNT, SIZE)
        self.blocks = PagedBlocks(self.model, Identity("the embedded one", "-"))
        self.transfer = open_transfer(self.blocks, url, self.keys)
        self.device = open_device("cpu")
        self.sizes = StateConfig(num_slots=ROWS, max_model_len=2 * TOKENS, block_size=SIZE)
        self.state = self.device.state(self.sizes)
        told = self.transfer.describe()
        pipe.send((told.url, told.public_key, dict(told.facts), told.session))
        from hal_core.handover import Description

        self.peer = Description(*pipe.recv())

    def step(self) -> None:
        """A decode step of the model: eight rows of one token each, in blocks of their own."""
        from hal.model.batch import ModelBatch

        tables = np.arange(ROWS, dtype=np.int32)[:, None] + 3 * COUNT
        ones = np.ones(ROWS, np.int32)
        self.model.forward(ModelBatch(5 * ones.astype(np.int64), ones.astype(np.int64), ones, ones, tables))

    def look(self, more: list[Any], milliseconds: int) -> list[Any]:
        """Wait for an event; return the ended requests."""
        poller = zmq.Poller()
        for one in (*self.transfer.sockets, *more):
            poller.register(one, zmq.POLLIN)
        poller.poll(milliseconds)
        return list(self.transfer.receive())


def admitted(side: Worker, name: str) -> AdmittedRequest:
    """A request for the decode role."""
    from hal_core import Request, SamplingParams, SplitRole

    request = Request(name, range(5, 5 + TOKENS), SamplingParams(max_tokens=9), role=SplitRole.DECODE)
    return side.state.admit(request, vocab_size=side.model.config.vocab_size)


def insert(side: Worker, slot: int, request: AdmittedRequest) -> None:
    """Put it into its slot, and wait until it is there."""
    from hal_core import Task, TaskKind

    blocks = range(slot * (COUNT + 1), (slot + 1) * (COUNT + 1))
    task = Task(TaskKind.REMOTE_PREFILL, slot, request, TOKENS, 0, list(blocks), first_token=7)
    side.device.insert_tasks(state=side.state, tasks=[task], stream=side.device.default_stream).wait(5)


def decode(pipe: Pipe, url: str | None) -> None:
    """Decode side: runs the commands from the pipe, and reports when each was done."""
    from hal_core.handover import Arrived

    from hal.transport.sockets import Bound
    from hal.transport.urls import private_ipc_url

    side = Worker(pipe, url)
    keys = None if side.keys is None else side.keys.knowing(side.peer.public_key)
    bound = Bound(private_ipc_url() if url is None else url, keys)
    pipe.send(bytes(bound.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
    busy, waiting = False, None
    while True:
        if busy:
            side.step()
        ended = side.look([bound.socket, pipe.fileno()], 0 if busy else 1000)
        for event in ended:
            assert isinstance(event, Arrived), event
            insert(side, 0, waiting)
            pipe.send(time.monotonic_ns())
        if bound.socket.poll(0):
            parts = bound.socket.recv_multipart(copy=False)
            pipe.send((time.monotonic_ns(), len(parts[-1].buffer)))
        while pipe.poll():
            said = pipe.recv()
            if said is None:
                bound.close()
                bound.release()
                side.transfer.close()
                return
            if isinstance(said, bool):
                busy = said
            else:
                side.state = side.device.state(side.sizes)  # its slots are free
                insert(side, 1, admitted(side, "another"))
                waiting = admitted(side, said.request_id)  # a worker learns of a request when its blocks are promised
                side.transfer.reserve(said, range(COUNT), side.peer)
            pipe.send("done")


class Prefill(Worker):
    """The prefill side, which measures."""

    def __init__(self, pipe: Pipe, url: str | None) -> None:
        from hal_core.frames import new_session

        from hal.transport.connection import Connection

        super().__init__(pipe, url)
        self.number = 0
        wake, _ = os.pipe()
        keys = None if self.keys is None else self.keys.knowing(self.peer.public_key)
        self.line = Connection(pipe.recv(), new_session(), keys, wake)
        self.bytes = self.blocks.read(range(COUNT)).tobytes()

    def ask(self, what: object) -> None:
        """Send the decode side a command, and wait until it is done."""
        self.pipe.send(what)
        assert self.pipe.recv() == "done"

    def raw(self) -> float:
        """Milliseconds of the bytes alone."""
        begin = time.monotonic_ns()
        while not self.line.send(self.bytes):
            self.line.follow()
            self.line.wait(time.monotonic() + 0.01, due=self.line.is_open)
            begin = time.monotonic_ns()
        end, size = self.pipe.recv()
        assert size == len(self.bytes)
        return float(end - begin) / 1e6

    def hand(self, chunks: int, *, busy: bool = False) -> float:
        """Milliseconds from when the last of so many chunks and the seal are given, until the request is inserted."""
        from hal_core.handover import Handover, HandoverKey

        self.number += 1
        key, each = HandoverKey(f"r{self.number}", 0), COUNT // chunks
        self.ask(key)
        for first in range(0, COUNT - each, each):
            self.transfer.send(key, self.peer, first, range(first, first + each))
            self.look([], 5)
        if chunks > 1:
            end = time.monotonic() + 0.02
            while time.monotonic() < end:
                self.look([], 5)
        begin = time.monotonic_ns()
        self.transfer.send(key, self.peer, COUNT - each, range(COUNT - each, COUNT))
        self.transfer.seal(key, self.peer, Handover(COUNT, TOKENS, 7))
        told = []
        while not told:
            if busy:
                self.step()
            told = self.look([], 0 if busy else 100)
        return float(self.pipe.recv() - begin) / 1e6

    def close(self) -> None:
        """End both sides."""
        self.pipe.send(None)
        self.line.close(0)
        self.line.end()
        self.transfer.close()


def timed(way: Callable[[], float], rounds: int) -> list[float]:
    """Milliseconds of each."""
    return [way() for _ in range(rounds)]


def measure(name: str, url: str | None, rounds: int) -> bool:
    """Print the table of one transport; whether the limit is met."""
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=decode, args=(other, url))
    process.start()
    other.close()
    side = Prefill(pipe, url)
    ways: Ways = {"raw": [], "whole": [], "last chunk": []}
    for number in range(rounds + 1):
        found = {
            "raw": timed(side.raw, 5),
            "whole": timed(lambda: side.hand(1), 5),
            "last chunk": timed(lambda: side.hand(CHUNKS), 5),
        }
        if number:  # the first is to warm up
            for way, times in found.items():
                ways[way] += times
    side.ask(True)
    ways["whole, decode side busy"] = timed(lambda: side.hand(1), 5 * rounds)
    side.ask(False)
    ways["whole, prefill side busy"] = timed(lambda: side.hand(1, busy=True), 5 * rounds)
    steps = []
    for _ in range(5 * rounds):
        begin = time.monotonic_ns()
        side.step()
        steps.append((time.monotonic_ns() - begin) / 1e6)
    ways["a step of eight rows, alone"] = steps
    side.close()
    process.join()
    raw = median(ways["raw"])
    print(f"{name}: {COUNT} blocks, {len(side.bytes) >> 10} KiB, {5 * rounds} of each")
    for way, times in ways.items():
        low, high = np.percentile(times, (10, 90))
        beyond = median(times) - raw
        print(f"  {way:28} median {median(times):6.2f} ms ({low:.2f} to {high:.2f}), beyond raw {beyond:6.2f}")
    beyond = median(ways["whole"]) - raw
    print(f"  limit {LIMIT} ms beyond raw: {'met' if beyond <= LIMIT else 'MISSED'}")
    return beyond <= LIMIT


def main(rounds: int) -> int:
    """Both transports; exit code 1 when the limit is missed."""
    from run import installed, versions

    print(f"{versions()}, zlib-ng {installed('zlib-ng')}; {os.cpu_count()} cores")
    met = [measure("ipc", None, rounds), measure("tcp with CURVE", "tcp://127.0.0.1:*", rounds)]
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
