"""Where the host time of an insertion goes, stage by stage, and whether memory grows over many insertions."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import torch
from hal_core.slots.admission import Request
from hal_core.slots.checks import problems
from hal_core.slots.tasks import TaskBatch

from .rig import PARAMS, Rig, blocks_of, median, quiet

T = TypeVar("T")


def stages(rig: Rig, count: int, tokens: int, rounds: int = 40) -> dict[str, float]:
    """Median microseconds of each stage; the clock's own calls make the sum a little larger than one insertion."""
    device, state, stream = rig.device.device, rig.state, rig.stream
    found: dict[str, list[float]] = {}
    slots, lengths, blocks = list(range(count)), [tokens] * count, blocks_of(count, tokens)

    def timed(name: str, work: Callable[[], T]) -> T:
        begin = perf_counter_ns()
        result = work()
        found.setdefault(name, []).append((perf_counter_ns() - begin) / 1e3)
        return result

    with quiet():
        for _ in range(rounds):
            requests = rig.admit(count, tokens)
            torch.cuda.synchronize()
            batch = timed("batch", lambda r=requests: TaskBatch.prefill(slots, r, lengths, blocks))  # type: ignore[misc]
            timed("sizes", lambda b=batch: b.check_sizes(state.layout))  # type: ignore[misc]
            twin = state.host_table.twin
            timed("checks", lambda b=batch, twin=twin: (twin and twin.sound(b)) or problems(state.host_table, b))  # type: ignore[misc]
            timed("entries, upload, launch, event", lambda b=batch: device.insertion.submit(state, b, stream))
            timed("commit", lambda b=batch: state.host_table.commit(b))
            state.release(slots)
    return {name: median(times) for name, times in found.items()}


def _resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(rig: Rig, inserts: int = 100_000) -> dict[str, Any]:
    """Admissions and insertions in steady state: host, pinned and device memory before and after."""
    device, state, stream = rig.device, rig.state, rig.stream
    blocks, asked = blocks_of(16, 64), [Request(f"r{i}", np.arange(64), PARAMS) for i in range(16)]

    def some(count: int) -> None:
        for at in range(count):
            slot = at % 16
            batch = TaskBatch.prefill([slot], [state.admit(asked[slot])], [64], [blocks[slot]])
            device.insert_tasks(state=state, tasks=batch, stream=stream)
            state.release([slot])
            if at % 500 == 0:
                torch.cuda.synchronize()

    def levels() -> dict[str, int]:
        ring, counts = device.device.staging, device.counters()
        free = torch.cuda.mem_get_info()[0]
        return {
            "resident_bytes": _resident(),
            "ring_bytes": ring.held,
            "admission_bytes": device.device.admissions.held,
            "ring_waits": ring.waits,
            "device_allocations": counts.allocations,
            "device_free_bytes": free,
            "events_made": device.device.events.made,
        }

    some(5_000)
    before = levels()
    begin = perf_counter_ns()
    some(inserts)
    torch.cuda.synchronize()
    seconds = (perf_counter_ns() - begin) / 1e9
    after = levels()
    return {
        "inserts": inserts,
        "seconds": round(seconds, 2),
        "before": before,
        "after": after,
        "growth": {name: after[name] - before[name] for name in before},
    }
