"""Host and total time of a broadcast on several ranks: ``broadcast_tokens``, one collective, and one a field.

    python -m benchmarks.gpu.broadcast [--device cuda] [--ranks 2] [--rounds 200] [--out docs/evidence]

The ways are timed on the same state, in turns: over NCCL on the device cuda, over hal's own on the device cpu, which
shows that the measurement works where there is no GPU. Beside them the bare ``ncclBroadcast`` by ctypes, and
Paddle's process group over the same library where this Paddle has it, in turns of their own: what another library
leaves in the caches would count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from hal_conformance.harness.subject import Recipe
from hal_conformance.opening import subject_of
from hal_conformance.ranks import work as rank_work
from hal_conformance.ranks.processes import Rank, RankPool
from hal_core.devices import HOST, opened
from hal_core.group import Group
from hal_core.memory.views import ByteRange
from hal_core.slots.fields import StateConfig

from .facts import facts

SIZES = StateConfig(num_slots=128, max_model_len=64, max_draft_tokens=5)
"""128 slots with 5 drafts each."""
ONE_BY_ONE = ("accept_tokens", "accept_num", "step_idx", "stop_flags")
"""What FastDeploy broadcasts field by field after verification."""
WARM = 20
Ways = dict[str, Callable[[], list[Any]]]
TIMEOUT = 10.0
"""Seconds that a collective may last."""
STARTING, MEASURING = 120.0, 90.0
"""Seconds in which the ranks must be up, and have measured."""


def measure(rank: Rank, recipe: Recipe, groups: Sequence[Sequence[int]], rounds: int) -> dict[str, Any]:
    """In each rank: for each way, host and total us of every round."""
    group = rank_work.group_of(rank, groups)
    with rank_work.opened(recipe) as bound:
        state = bound.state(SIZES)
        bound.open_group(state=state, group=group)
        named, hals, others = _ways(bound, state, group)
        stream = bound.default_stream
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (*hals, *others)}
        turns = [(turn, way) for ways in (hals, others) for turn in range(WARM + rounds) for way in ways.items()]
        for turn, (name, way) in turns:
            begin = perf_counter_ns()
            tickets = way()
            called = perf_counter_ns()
            for ticket in tickets or [stream.record()]:
                while not ticket.done():  # a wait would sleep between two looks
                    pass
            if turn >= WARM:
                times[name][0].append((called - begin) / 1e3)
                times[name][1].append((perf_counter_ns() - begin) / 1e3)
            for ticket in tickets:
                ticket.wait(TIMEOUT)
    return {"fields": named, "bytes": state.broadcast_range().nbytes, "times": times}


def _ways(bound: Any, state: Any, group: Group) -> tuple[list[str], Ways, Ways]:  # noqa: ANN401
    """Return the names of the fields, hal's methods with the library's bare call, and Paddle's, which are timed later.

    A method returns tickets, or None if the stream orders the end.
    """
    communicator = bound.device.communicator(group)
    memory, stream, span = state.memory, bound.default_stream, state.broadcast_range()
    places = {n: p for n, p in state.layout.fields.items() if span.offset <= p.offset < span.end}
    parts = [ByteRange(places[name].offset, places[name].stride * SIZES.num_slots) for name in ONE_BY_ONE]
    count = len(parts)
    ways: Ways = {
        "broadcast_tokens": lambda: [bound.broadcast_tokens(state=state, group=group, stream=stream)],
        "one collective": lambda: [communicator.broadcast(memory, span, stream)],
        f"{count} collectives": lambda: [communicator.broadcast(memory, part, stream) for part in parts],
    }
    if comm := getattr(communicator, "comm", None):

        def bare() -> list[Any]:
            begin, nbytes, source = memory.address + span.offset, span.nbytes, comm.ranks.index(group.source)
            comm.broadcast(begin, nbytes, source, stream.handle)
            return []

        ways["ncclBroadcast"] = bare
    return list(places), ways, _paddles(bound, memory, (span, *parts), group)


def _paddles(
    bound: Any,  # noqa: ANN401 (a bound device)
    memory: Any,  # noqa: ANN401 (the device's)
    parts: Sequence[ByteRange],
    group: Group,
) -> Ways:
    """Return Paddle's process group over the same library, on the same memory; empty if Paddle lacks it."""
    import paddle

    library = bound.capabilities.collective
    if library == HOST:
        return {}
    if library == "nccl":
        if not paddle.is_compiled_with_cuda():
            return {}
        paddle.set_device(f"gpu:{bound.device.index}")
        base = memory.keep.view("uint8")
        tensors = [base[part.offset : part.end] for part in parts]
    else:
        communicator = bound.device.communicator(group)
        tensors = [communicator._tensor(memory, part) for part in parts]
    made = opened(group, backend=library)
    source = made.ranks.index(group.source)

    def call(chosen: Sequence[Any]) -> list[Any]:
        for tensor in chosen:  # what paddle.distributed.broadcast does after its checks
            made.process_group.group.broadcast(tensor, source, True).wait()
        return []

    return {
        "Paddle, one call": lambda: call(tensors[:1]),
        f"Paddle, {len(parts) - 1} calls": lambda: call(tensors[1:]),
    }


def run(device: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Start the ranks, measure, end them. Raises a rank's error, with its output."""
    recipe = Recipe(device)
    support = subject_of(recipe).support
    if not support.ranks:
        raise SystemExit(f"no ranks of {device} can be started here: {support.why_not('several_ranks')}")
    groups = (tuple(range(ranks)),)

    def environment(rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        paths = os.pathsep.join(path for path in sys.path if path)
        return {"PYTHONPATH": paths} | dict(support.rank_environment(rank, endpoints))

    with RankPool(ranks, environment=environment) as pool:
        pool.run(rank_work.join, recipe, groups, TIMEOUT, "bench", timeout=STARTING)
        answers = pool.run(measure, recipe, groups, rounds, timeout=MEASURING)
    first = answers[0]
    rows = []
    for way in first["times"]:
        host, total = first["times"][way]
        slowest = [max(values) for values in zip(*(a["times"][way][1] for a in answers.values()), strict=True)]
        row = {"way": way, "host_us": median(host), "host_p10_p90": spread(host), "total_us": median(total)}
        rows.append(row | {"total_slowest_rank_us": median(slowest)})
    measured = {"device": device, "ranks": ranks, "rounds": rounds, "slots": SIZES.num_slots}
    return measured | {"fields": first["fields"], "bytes": first["bytes"], "rows": rows}


def median(values: Sequence[float]) -> float:
    """Return the median, to three digits after the point."""
    return round(float(np.median(values)), 3)


def spread(values: Sequence[float]) -> list[float]:
    """Return the 10th and 90th percentile."""
    return [round(float(value), 3) for value in np.percentile(values, [10, 90])]


def table(found: Mapping[str, Any]) -> str:
    """The rows as text."""
    fields, where = ", ".join(found["fields"]), f"{found['ranks']} ranks, {found['device']}"
    what = "us: host of the source (p10, p90), total there, total of the slowest"
    lines = [f"broadcast of {found['bytes']} bytes ({fields}), {where}", f"  medians of {found['rounds']}, {what}"]
    for row in found["rows"]:
        host = f"{row['host_us']:9.1f} {row['host_p10_p90']!s:20}"
        lines.append(f"  {row['way']:20} {host} {row['total_us']:9.1f} {row['total_slowest_rank_us']:9.1f}")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write ``gpu-broadcast.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    chosen = parser.parse_args()
    found = {"facts": facts("benchmarks.gpu.broadcast"), **run(chosen.device, chosen.ranks, chosen.rounds)}
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "gpu-broadcast.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    from benchmarks.gpu import broadcast  # ranks import `measure` by this module's name

    broadcast.main()
