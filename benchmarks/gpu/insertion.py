"""Insertion: host time with the GPU idle and behind a busy kernel, GPU time by events, ours against the peers' ways."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from hal_core.slots.tasks import TaskBatch

from .peers import WAYS, Inputs, Tensors, empty_tensors
from .rig import Rig, blocks_of, median, quiet, spread

CASES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (8, 8192))
BUSY_MS = 20.0
BLOCK = 10
OURS = "hal"
AGAIN = "hal, one by one"
"""Time hal's insertions with all batches of a block admitted first: only a wait for the idle GPU is between two
insertions."""
Prepared = Callable[[], None]


class Insertions:
    """All ways of inserting, each with its own tensors."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.tensors: dict[str, Tensors] = {name: empty_tensors(rig.state.layout) for name in WAYS}

    def prepared(self, way: str, count: int, tokens: int) -> Prepared:
        """Admit requests now, and return what inserts them: from validated requests to the ticket."""
        rig, slots, lengths = self.rig, list(range(count)), [tokens] * count
        requests, blocks = rig.admit(count, tokens), blocks_of(count, tokens)
        if way == OURS:

            def insert() -> None:
                batch = TaskBatch.prefill(slots, requests, lengths, blocks)
                rig.device.insert_tasks(state=rig.state, tasks=batch, stream=rig.stream)

            return insert
        inputs = [Inputs.of(rig.state.layout, r, tokens, b) for r, b in zip(requests, blocks, strict=True)]
        function, tensors = WAYS[way], self.tensors[way]
        return lambda: function(tensors, slots, inputs)

    def once(self, way: str, count: int, tokens: int, busy_ms: float) -> tuple[float, float]:
        """Host and GPU microseconds of one insertion; GPU time only behind a busy kernel."""
        rig, insert = self.rig, self.prepared(way, count, tokens)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if busy_ms:
            rig.stand_in.launch(busy_ms, rig.stream.handle)
            begin.record()
        start = perf_counter_ns()
        insert()
        host = (perf_counter_ns() - start) / 1e3
        if busy_ms:
            end.record()
        torch.cuda.synchronize()
        if way == OURS:
            rig.state.release(range(count))
        return host, begin.elapsed_time(end) * 1e3 if busy_ms else 0.0

    def one_by_one(self, count: int, tokens: int) -> list[float]:
        """Host microseconds of ``BLOCK`` insertions, the first two of the block left out."""
        ready = [self.prepared(OURS, count, tokens) for _ in range(BLOCK + 2)]
        found = []
        for insert in ready:
            torch.cuda.synchronize()
            start = perf_counter_ns()
            insert()
            found.append((perf_counter_ns() - start) / 1e3)
            self.rig.state.release(range(count))
        torch.cuda.synchronize()
        return found[2:]

    def check_equal(self, count: int, tokens: int) -> list[str]:
        """Insert the same requests in every way and compare all fields of all slots; what differs."""
        rig, slots, lengths = self.rig, list(range(count)), [tokens] * count
        requests, blocks = rig.admit(count, tokens), blocks_of(count, tokens)
        batch = TaskBatch.prefill(slots, requests, lengths, blocks)
        rig.device.insert_tasks(state=rig.state, tasks=batch, stream=rig.stream)
        inputs = [Inputs.of(rig.state.layout, r, tokens, b) for r, b in zip(requests, blocks, strict=True)]
        wrong = []
        expected = rig.dump()
        rig.state.release(slots)
        for name, way in WAYS.items():
            way(self.tensors[name], slots, inputs)
            torch.cuda.synchronize()
            for field, column in expected.items():
                got = self.tensors[name][field].cpu().numpy()
                if not np.array_equal(got[:count], column[:count]):
                    wrong.append(f"{name}: {field} differs")
        return wrong


def measure(rig: Rig, rounds: int) -> dict[str, Any]:
    """Every case and way; the ways take turns in blocks of rounds, so that a bad phase of the machine meets all."""
    insertions = Insertions(rig)
    different = [text for count, tokens in CASES for text in insertions.check_equal(count, tokens)]
    rows = []
    for count, tokens in CASES:
        found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in (OURS, AGAIN, *WAYS)}
        with quiet():
            for _ in range(-(-rounds // BLOCK)):
                for way, times in found.items():
                    if way == AGAIN:
                        times += [(host, 0.0, 0.0) for host in insertions.one_by_one(count, tokens)]
                        continue
                    block = []
                    for _ in range(BLOCK + 2):  # the first two find the other ways' caches
                        idle, _ = insertions.once(way, count, tokens, 0.0)
                        block.append((idle, *insertions.once(way, count, tokens, BUSY_MS)))
                    times += block[2:]
        for way, times in found.items():
            idle, busy, gpu = zip(*times, strict=True)
            rows.append(
                {
                    "requests": count,
                    "tokens": tokens,
                    "way": way,
                    "host_idle_us": median(idle),
                    "host_idle_p10_p90": spread(idle),
                    "host_busy_us": median(busy) or None,
                    "gpu_us": median(gpu) or None,
                }
            )
    return {"rows": rows, "rounds": rounds, "busy_ms": BUSY_MS, "differences": different}
