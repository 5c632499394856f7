"""The decode gap: from the end of one step's kernel to the beginning of the next one's, by the GPU's own clock.

Every step inserts k new requests of 1,024 tokens into 128 running slots, runs a stand-in for the decode kernel, which
writes the sampled tokens, and brings the output to the host. ``waits``: the host has read the tokens before it inserts.
``overlapped``: it runs up to two steps ahead. For hal all hooks are at work: insert_tasks, the kernel, async_set_value,
broadcast_tokens (a group of one), update_inputs, save_output with a sink that has a thread; the peers' ways insert, run
the kernel and copy the tokens out. With several ranks an all-reduce over NCCL begins each step: the ranks meet on the
GPU.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from .peers import FUSED, WAYS, Inputs, Tensors, empty_tensors
from .rig import SLOTS, Busy, Rig, blocks_of, median, quiet
from .turns import MANNERS, OURS, Parts, Turn, Turns, slots_of

TOKENS, AHEAD, WARM = 1024, 2, 5
STAGED = 3200
"""Requests that are admitted before they are inserted one after the other: hal stages about so many."""
NOTHING = "nothing inserted"
PIECES = 8
"""How often ranks meet in a step of one row: those of a model do so twice in each of its layers."""
IDLE_MS, IDLE_STEPS = (5.0, 7.5, 10.0, 12.5, 15.0, 20.0, 30.0), 50
"""Steps without a collective of the ranks and without an insertion."""
Meet = Callable[[], None]
ALL: Turn = (0, 1)


class Loop:
    """Runs steps of one way on one rig."""

    def __init__(self, rig: Rig, meet: Meet) -> None:
        self.rig, self.meet = rig, meet
        self.tensors: dict[str, Tensors] = {}
        self.turn, self.busy, self.pieces = ALL, Busy(used=False), 1

    def run(
        self, way: str, decode_ms: float, count: int, *, waits: bool, steps: int, busy: bool = False, turn: Turn = ALL,
        pieces: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        """Gap (ms) and host time a step (ms), the first steps left out; ``busy``: beside a thread that computes;
        ``pieces``: how often the ranks meet in a step, at its beginning and after each further piece, as layers do."""
        run = self._ours if way in MANNERS else self._peer
        self.turn, self.pieces, host, found = turn, pieces, [], []
        parts: Parts = {}
        mine: list[bool] = []
        while len(found) + WARM + 1 < steps:  # in pieces: so many requests are admitted before each
            part = min(steps - len(found), STAGED // count)
            times = torch.zeros((part, 2 * min(pieces, 2)), dtype=torch.int64, device="cuda")
            torch.cuda.synchronize()
            self.meet()
            torch.cuda.synchronize()
            with quiet(), Busy(used=busy) as self.busy:
                host += run(way, decode_ms, count, waits, part, times, parts)[WARM:]
                torch.cuda.synchronize()
            stamps = times.cpu().numpy()
            found += ((stamps[1:, 0] - stamps[:-1, -1])[WARM:] / 1e6).tolist()
            mine += [number % turn[1] == turn[0] for number in range(1, part)][WARM:]
        return self._told(way, decode_ms, count, waits, busy, np.array(found), np.array(mine), host, parts)

    def _told(
        self, way: str, decode_ms: float, count: int, waits: bool, busy: bool,
        gaps: np.ndarray[Any, Any], mine: np.ndarray[Any, Any], host: list[float], parts: Parts,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the row of the table: gaps before the steps that this rank inserted for, and before all other
        steps."""
        others: dict[str, Any] = {} if self.pieces == 1 else {"pieces": self.pieces}
        others |= {} if mine.all() else {"gap_of_others_ms": round(float(gaps[~mine].mean()), 4)}
        return {
            **others,
            "gap_mean_ms": round(float(gaps[mine].mean()), 4),
            "gap_p99_ms": round(float(np.percentile(gaps[mine], 99)), 3),
            "busy": busy,
            "steps": len(gaps),
            "way": way,
            "decode_ms": decode_ms,
            "inserts": count,
            "mode": "waits" if waits else "overlapped",
            "gap_ms": median(gaps[mine].tolist()),
            "gap_p90_ms": round(float(np.percentile(gaps[mine], 90)), 3),
            "host_ms": median(host),
            "host_parts_us": {name: median(values[WARM:]) for name, values in parts.items()},
        }

    def _ours(
        self, way: str, decode_ms: float, count: int, waits: bool, steps: int, times: torch.Tensor, parts: Parts
    ) -> list[float]:
        decode = partial(self._decode, times, decode_ms)
        turns = Turns(self.rig, decode, MANNERS[way], count, TOKENS, steps, self.turn)
        under_way, host = deque[Any](), []
        torch.cuda.synchronize()
        self.busy.on()
        for number in range(steps):
            if len(under_way) == AHEAD:
                self.rig.state.take(under_way.popleft())  # as the engine's loop
            begin = perf_counter_ns()
            under_way.append(turns.launch(number))
            host.append((perf_counter_ns() - begin) / 1e6)
            turns.prepare(number + 1)
            if waits:
                turns.take(under_way.pop())
        self.busy.off()
        turns.close(under_way)
        for name, values in turns.parts.items():
            parts.setdefault(name, []).extend(values)
        return host

    def _decode(self, times: torch.Tensor, decode_ms: float, number: int, tokens: int) -> None:
        """The stand-in of a step, in pieces before each of which the ranks meet."""
        at, last = times.data_ptr() + number * times.shape[1] * 8, self.pieces - 1
        for piece in range(self.pieces):
            self.meet()
            to = at if piece == 0 else at + 16 if piece == last else 0
            handle, written = self.rig.stream.handle, tokens if piece == last else 0
            self.rig.stand_in.launch(decode_ms / self.pieces, handle, times=to, tokens=written, step=number)

    def _peer(
        self, way: str, decode_ms: float, count: int, waits: bool, steps: int, times: torch.Tensor, parts: Parts
    ) -> list[float]:
        del parts
        rig, insert = self.rig, (lambda *_: None) if way == NOTHING else WAYS[way]
        tensors = self.tensors.setdefault(way, empty_tensors(rig.state.layout))
        blocks = blocks_of(count, TOKENS)
        requests = rig.admit(count, TOKENS)
        inputs = [Inputs.of(rig.state.layout, r, TOKENS, b) for r, b in zip(requests, blocks, strict=True)]
        sampled = tensors["sampled_token_ids"]
        to = [torch.zeros((SLOTS, 1), dtype=torch.int64, pin_memory=True) for _ in range(AHEAD + 1)]
        under_way, host = deque[torch.cuda.Event](), []
        torch.cuda.synchronize()
        self.busy.on()
        for number in range(steps):
            if len(under_way) == AHEAD:
                under_way.popleft().synchronize()
            begin = perf_counter_ns()
            if number % self.turn[1] == self.turn[0]:
                insert(tensors, slots_of(number // self.turn[1], count), inputs)
            self._decode(times, decode_ms, number, sampled.data_ptr())
            to[number % len(to)].copy_(sampled, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            host.append((perf_counter_ns() - begin) / 1e6)
            if waits:
                event.synchronize()
                to[number % len(to)].tolist()
            else:
                under_way.append(event)
        self.busy.off()
        return host


def measure(
    rig: Rig,
    steps: int,
    meet: Meet,
    decode: tuple[float, ...] = (5.0, 10.0, 20.0),
    ways: tuple[str, ...] = (OURS, *WAYS),
) -> list[dict[str, Any]]:
    """All combinations; a synchronous way cannot overlap."""
    loop, rows = Loop(rig, meet), []
    for way in ways:
        loop.run(way, 1.0, 1, waits=True, steps=WARM + 3)  # warm up: kernels, caches of pinned memory
        for decode_ms in decode:
            for count in (1, 4, 16):
                for waits in (True, False):
                    if waits or "synchronous" not in way:
                        rows.append(loop.run(way, decode_ms, count, waits=waits, steps=steps))
    return rows


def alone() -> None:
    """Run without a collective: there is one rank."""


def on_ranks(steps: int, decode: tuple[float, ...], *, in_turn: bool = False) -> dict[str, Any] | None:
    """Run the experiment as one rank of several (torchrun's environment variables). Return the result on rank 0.

    ``in_turn``: the ranks insert in turn, one at each step; hal, and vLLM's method, overlapped alone; the longest steps
    in pieces too, and the time of a collective after so long without one.
    """
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rig = Rig.open(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    flag = torch.zeros(1, device="cuda")

    def meet() -> None:
        dist.all_reduce(flag)

    for _ in range(5):
        meet()
    torch.cuda.synchronize()
    if in_turn:
        loop = Loop(rig, meet)
        mine = []
        for way in (OURS, FUSED, NOTHING):
            loop.run(way, 1.0, 1, waits=False, steps=3 * WARM)
            mine += [loop.run(way, ms, 16, waits=False, steps=steps, turn=(rank, size)) for ms in decode]
            mine.append(loop.run(way, decode[-1], 16, waits=False, steps=steps, turn=(rank, size), pieces=PIECES))
        mine += [loop.run(NOTHING, ms, 16, waits=False, steps=IDLE_STEPS) for ms in IDLE_MS]
    else:
        mine = measure(rig, steps, meet, decode)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, mine)
    packed = _broadcasts(rig)
    dist.destroy_process_group()
    if rank:
        return None
    rows = []
    for same in zip(*gathered, strict=True):
        gaps = [row["gap_ms"] for row in same]
        others = [row["gap_of_others_ms"] for row in same if "gap_of_others_ms" in row]
        mean = round(sum(row["gap_mean_ms"] for row in same) / size, 4)
        told = {**same[0], "gap_ms": median(gaps), "gap_mean_ms": mean, "gap_ranks_ms": gaps}
        rows.append(told | ({"gap_of_others_ms": median(others)} if others else {}))
    return {"ranks": size, "rows": rows, "broadcast": packed}


def _broadcasts(rig: Rig, rounds: int = 200) -> dict[str, dict[str, float]]:
    """One NCCL broadcast of adjacent fields against one a field (128 slots, 5 drafts), through torch.distributed."""
    import torch.distributed as dist

    shapes = {"accept_tokens": (SLOTS, 6), "accept_num": (SLOTS,), "step_idx": (SLOTS,), "stop_flags": (SLOTS,)}
    kinds = {"accept_num": torch.int32, "stop_flags": torch.uint8}
    four = [torch.zeros(s, dtype=kinds.get(n, torch.int64), device="cuda") for n, s in shapes.items()]
    one = torch.zeros(sum(t.numel() * t.element_size() for t in four), dtype=torch.uint8, device="cuda")
    found = {}
    for name, tensors in (("packed", [one]), ("four", four)):
        host, total = [], []
        for at in range(rounds + 20):
            torch.cuda.current_stream().synchronize()
            begin = perf_counter_ns()
            for tensor in tensors:
                dist.broadcast(tensor, 0)
            called = perf_counter_ns()
            torch.cuda.current_stream().synchronize()
            if at >= 20:
                host.append((called - begin) / 1e3)
                total.append((perf_counter_ns() - begin) / 1e3)
        found[name] = {"host_us": median(host), "total_us": median(total)}
    del rig
    return found
