"""The speed table: each call of hal quiet and beside one busy Python thread, the peers' ways in the same run.

Host times in us, median and 99th percentile; right before each insertion its requests are admitted, and the GPU idles.
Gaps in ms, by the GPU's clock (:mod:`benchmarks.gpu.gap`): 16 requests of 1,024 tokens enter at each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskBatch

from .gap import NOTHING, OURS, Loop, alone
from .insertion import Insertions
from .peers import FUSED, WAYS
from .rig import SLOTS, Busy, Rig, blocks_of, quiet
from .single import Unread

Row = dict[str, Any]
PAUSE = 5
SLOW_BESIDE = ("(a) synchronous", "(b) per field", "(c) staged", "(c') staged numpy")
"""Ways whose many calls each give up the interpreter's lock, which takes seconds: beside a busy thread, once."""


def timed(
    prepare: Callable[[], Callable[[], object]], rounds: int, *, busy: bool, pause: int = PAUSE
) -> tuple[float, float]:
    """Median and 99th percentile, us, of what ``prepare`` returns, the first ``pause`` calls left out; the GPU is idle
    before each call."""
    times = []
    with quiet(), Busy(used=busy) as other:
        for _ in range(rounds + pause):
            call = prepare()
            torch.cuda.synchronize()
            other.on()
            begin = perf_counter_ns()
            call()
            times.append((perf_counter_ns() - begin) / 1e3)
            other.off()
        torch.cuda.synchronize()
    return tuple(round(float(np.percentile(times[pause:], part)), 1) for part in (50, 99))  # type: ignore[return-value]


def _row(work: str, way: str, value: float, p99: float | None = None, **more: object) -> Row:
    row = {"work": work, "way": way, "value": value, "p99": p99, **more}
    print("  ", row, file=sys.stderr, flush=True)
    return row


def insertions(rig: Rig, rounds: int) -> list[Row]:
    """128, 16 and 1 request; the ways take turns, quiet and then beside a busy thread."""
    made, rows = Insertions(rig), []

    def prepared(way: str, count: int) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            if way == OURS:
                rig.state.release(range(SLOTS))
            return made.prepared(way, count, 1024)

        return prepare

    for busy in (False, True):
        for count in (128, 16, 1):
            for way in (OURS, *WAYS):
                slow = busy and way in SLOW_BESIDE
                if slow and count > 1:
                    continue
                here = 1 if slow else rounds if way == OURS else max(5, rounds // 12)
                value, p99 = timed(prepared(way, count), here, busy=busy, pause=0 if slow else PAUSE)
                if way == OURS:
                    rig.state.release(range(SLOTS))
                rows.append(_row(f"insert {count} x 1024, us", way, value, p99, busy=busy, rounds=here))
    return rows


def single(rig: Rig, rounds: int) -> list[Row]:
    """``async_set_value`` of a scalar, and ``save_output`` of 128 running slots."""
    device, state, stream, rows = rig.device, rig.state, rig.stream, []
    requests = rig.admit(SLOTS, 1024)
    batch = TaskBatch.prefill(list(range(SLOTS)), requests, [1024] * SLOTS, blocks_of(SLOTS, 1024))
    device.insert_tasks(state=state, tasks=batch, stream=stream)
    scalar, step, sink = state.view("temperature")[3], Step(1, {"target": np.arange(SLOTS)}), Unread()

    def put() -> None:
        device.async_set_value(target=scalar, value=0.5, stream=stream)

    def save() -> None:
        device.save_output(state=state, step=step, sink=sink, stream=stream)

    def written() -> Callable[[], object]:
        put()  # as each step writes, after earlier copies out are over
        return save

    for busy in (False, True):
        for work, prepare in (("async_set_value of a scalar, us", lambda: put), ("save_output, us", written)):
            value, p99 = timed(prepare, 3 * rounds if not busy else rounds, busy=busy)
            rows.append(_row(work, OURS, value, p99, busy=busy))
    state.release(range(SLOTS))
    return rows


def gaps(rig: Rig, steps: int) -> list[Row]:
    """Measure one rank: waiting and overlapped, quiet and beside a busy thread; hal with ``steps`` steps, the peers
    with fewer."""
    loop, rows = Loop(rig, alone), []
    few = max(40, steps // 20)

    def add(way: str, ms: float, *, waits: bool, busy: bool, count: int) -> None:
        found = loop.run(way, ms, 16, waits=waits, steps=count, busy=busy)
        work = f"gap, 16 inserts, {found['mode']}, {ms:g} ms steps, ms"
        more = {"median": found["gap_ms"], "busy": busy, "steps": count, "parts_us": found["host_parts_us"]}
        rows.append(_row(work, way, found["gap_mean_ms"], found["gap_p99_ms"], **more))

    for way in (OURS, *WAYS, NOTHING):
        loop.run(way, 1.0, 1, waits=True, steps=12)  # kernels, caches of pinned memory
        add(way, 5.0, waits=True, busy=False, count=few)
        if "synchronous" not in way:
            add(way, 5.0, waits=False, busy=False, count=steps if way == OURS else few)
        if way in (OURS, FUSED, NOTHING, "(b) per field"):
            add(way, 20.0, waits=False, busy=False, count=steps // 10 if way == OURS else few)
    for way in (OURS, NOTHING, FUSED):
        for ms in (20.0, 5.0):
            add(way, ms, waits=False, busy=True, count=steps // 7 if way == OURS else few)
        if way != FUSED:
            add(way, 5.0, waits=True, busy=True, count=few)
    return rows


def measure(rig: Rig, rounds: int, steps: int) -> list[Row]:
    """The whole table of one GPU."""
    return [*single(rig, rounds), *insertions(rig, rounds), *gaps(rig, steps)]


WANTED = {
    "insert 128 x 1024, us": "80 (120 with its profile); busy 3 x quiet, p99 6,000",
    "insert 1 x 1024, us": "20; busy 3 x quiet, p99 6,000",
    "async_set_value of a scalar, us": "4; busy 3 x quiet",
    "save_output, us": "12",
    "gap, 16 inserts, waits, 5 ms steps, ms": "0.25",
    "gap, 16 inserts, overlapped, 5 ms steps, ms": "0.026; busy reported",
    "gap, 16 inserts, overlapped, 20 ms steps, ms": "0.026; busy 0.05",
}


def table(rows: Sequence[Row]) -> list[str]:
    """Work by work, quiet beside busy, and the ratio to the best peer."""
    lines = ["", f"{'':28}{'quiet':>14}{'p99':>14}{'busy':>14}{'p99':>14}"]
    for work in dict.fromkeys(row["work"] for row in rows):
        lines.append(f"{work}" + (f"    (wanted: {WANTED[work]})" if work in WANTED else ""))
        mine = [row for row in rows if row["work"] == work]
        for way in dict.fromkeys(row["way"] for row in mine):
            line = f"    {way:24}"
            for busy in (False, True):
                found = next((row for row in mine if row["way"] == way and row["busy"] is busy), None)
                line += f"{found['value']:14.3f}{found['p99']:14.3f}" if found else f"{'-':>14}{'-':>14}"
            lines.append(line)
        quietly = {row["way"]: row["value"] for row in mine if not row["busy"] and row["way"] != NOTHING}
        peers = {way: value for way, value in quietly.items() if way != OURS}
        if peers and OURS in quietly:
            best = min(peers, key=lambda way: peers[way])
            lines.append(f"    the best peer, {best}, takes {peers[best] / quietly[OURS]:.1f} times what hal takes")
    return lines


def in_turn(rows: Sequence[dict[str, Any]], ranks: int) -> list[str]:
    """Measure ranks that meet at each step, one of which inserts: its gap, and those of the remaining ranks."""
    lines = ["", f"gap, 16 inserts on one of {ranks} ranks in turn, overlapped: mean ms, the other ranks' beside it"]
    for row in rows:
        others = row.get("gap_of_others_ms", 0.0)
        steps = f"{row['decode_ms']:5.1f} ms steps" + (f", {row['pieces']} meetings in each" if "pieces" in row else "")
        lines.append(f"    {row['way']:24}{steps:36}{row['gap_mean_ms']:10.4f} {others:10.4f}")
    return lines
