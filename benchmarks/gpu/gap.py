"""The decode gap: from the end of one step's kernel to the beginning of the next one's, by the GPU's own clock.

Every step inserts k new requests of 1,024 tokens into 128 running slots, runs a stand-in for the decode kernel, which
writes the sampled tokens, and brings the output to the host. ``waits``: the host has read the tokens before it inserts.
``overlapped``: it runs up to two steps ahead. For hal all hooks are at work: insert_tasks, the kernel, async_set_value,
broadcast_tokens (a group of one), advance, save_output with a sink that has a thread; the peers' ways insert, run the
kernel and copy the tokens out. With several ranks an all-reduce over NCCL begins each step: the ranks meet on the GPU.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from hal_core.group import ALONE
from hal_core.output.sinks import MemorySink
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskBatch
from hal_core.tickets import Ticket

from .rig import SLOTS, Rig, blocks_of, median, quiet
from .ways import WAYS, Inputs, Tensors, empty_tensors

TOKENS, AHEAD, WARM = 1024, 2, 5
OURS = "hal"
Meet = Callable[[], None]
Parts = dict[str, list[float]]


def _slots(step: int, count: int) -> list[int]:
    """The slots that step number ``step`` fills; they go round."""
    return [(step * count + i) % SLOTS for i in range(count)]


class Loop:
    """Runs steps of one way on one rig."""

    def __init__(self, rig: Rig, meet: Meet) -> None:
        self.rig, self.meet = rig, meet
        self.tensors: dict[str, Tensors] = {}

    def run(self, way: str, decode_ms: float, count: int, *, waits: bool, steps: int) -> dict[str, Any]:
        """Median gap (ms) and host time a step (ms), the first steps left out."""
        times = torch.zeros((steps, 2), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        self.meet()
        torch.cuda.synchronize()
        run = self._ours if way == OURS else self._peer
        with quiet():
            parts: Parts = {}
            host = run(way, decode_ms, count, waits, steps, times, parts)
            torch.cuda.synchronize()
        stamps = times.cpu().numpy()
        gaps = (stamps[1:, 0] - stamps[:-1, 1])[WARM:] / 1e6
        return {
            "way": way,
            "decode_ms": decode_ms,
            "inserts": count,
            "mode": "waits" if waits else "overlapped",
            "gap_ms": median(gaps.tolist()),
            "gap_p90_ms": round(float(np.percentile(gaps, 90)), 3),
            "host_ms": median(host[WARM:]),
            "host_parts_us": {name: median(values[WARM:]) for name, values in parts.items()},
        }

    def _ours(
        self, way: str, decode_ms: float, count: int, waits: bool, steps: int, times: torch.Tensor, parts: Parts
    ) -> list[float]:
        del way

        def note(name: str, since: int) -> int:
            now = perf_counter_ns()
            parts.setdefault(name, []).append((now - since) / 1e3)
            return now

        rig, device, state, stream = self.rig, self.rig.device, self.rig.state, self.rig.stream
        everybody, blocks, lengths = list(range(SLOTS)), blocks_of(count, TOKENS), [TOKENS] * count
        first = TaskBatch.prefill(everybody, rig.admit(SLOTS, TOKENS), [TOKENS] * SLOTS, blocks_of(SLOTS, TOKENS))
        device.insert_tasks(state=state, tasks=first, stream=stream)
        admitted = [rig.admit(count, TOKENS) for _ in range(steps)]
        sampled = state.memory.address + state.layout.fields["sampled_token_ids"].offset
        temperature, order = state.view("temperature")[0], np.arange(SLOTS)
        sink, under_way, host = MemorySink(threaded=True), deque[Ticket](), []
        torch.cuda.synchronize()
        for number in range(steps):
            if len(under_way) == AHEAD:
                under_way.popleft().wait()
            at = begin = perf_counter_ns()
            slots = _slots(number, count)
            state.release(slots)
            at = note("release", at)
            batch = TaskBatch.prefill(slots, admitted[number], lengths, blocks)
            at = note("batch", at)
            device.insert_tasks(state=state, tasks=batch, stream=stream)
            at = note("insert_tasks", at)
            device.async_set_value(target=temperature, value=0.5, stream=stream)
            at = note("async_set_value", at)
            self.meet()
            to = times.data_ptr() + number * 16
            rig.stand_in.launch(decode_ms, stream.handle, times=to, tokens=sampled, step=number)
            at = note("decode kernel", at)
            device.broadcast_tokens(state=state, group=ALONE, stream=stream)
            step = Step(number, {"target": order})
            device.update_inputs(state=state, step=step, stream=stream)
            at = note("update_inputs", at)
            ticket = device.save_output(state=state, step=step, sink=sink, stream=stream)
            at = note("save_output", at)
            host.append((at - begin) / 1e6)
            if waits:
                state.take(ticket)
                note("take", at)
            else:
                under_way.append(ticket)
        for ticket in under_way:
            ticket.wait()
        sink.close(10.0)
        state.release(everybody)
        return host

    def _peer(
        self, way: str, decode_ms: float, count: int, waits: bool, steps: int, times: torch.Tensor, parts: Parts
    ) -> list[float]:
        del parts
        rig, insert = self.rig, WAYS[way]
        tensors = self.tensors.setdefault(way, empty_tensors(rig.state.layout))
        blocks = blocks_of(count, TOKENS)
        requests = rig.admit(count, TOKENS)
        inputs = [Inputs.of(rig.state.layout, r, TOKENS, b) for r, b in zip(requests, blocks, strict=True)]
        sampled = tensors["sampled_token_ids"]
        to = [torch.zeros((SLOTS, 1), dtype=torch.int64, pin_memory=True) for _ in range(AHEAD + 1)]
        under_way, host = deque[torch.cuda.Event](), []
        torch.cuda.synchronize()
        for number in range(steps):
            if len(under_way) == AHEAD:
                under_way.popleft().synchronize()
            begin = perf_counter_ns()
            insert(tensors, _slots(number, count), inputs)
            self.meet()
            at = times.data_ptr() + number * 16
            rig.stand_in.launch(decode_ms, rig.stream.handle, times=at, tokens=sampled.data_ptr(), step=number)
            to[number % len(to)].copy_(sampled, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            host.append((perf_counter_ns() - begin) / 1e6)
            if waits:
                event.synchronize()
                to[number % len(to)].tolist()
            else:
                under_way.append(event)
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
    """One rank meets nobody."""


def on_ranks(steps: int, decode: tuple[float, ...]) -> dict[str, Any] | None:
    """The experiment as one rank of several (torchrun's environment variables); the result on rank 0."""
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
        rows.append({**same[0], "gap_ms": median(gaps), "gap_ranks_ms": gaps})
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
