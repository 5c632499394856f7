"""broadcast_tokens over gloo, two ranks, against one bare broadcast of the same bytes, in one run.

Speculative decoding, 128 slots, 5 drafts. Short rounds of the ways are interleaved, so that a bad phase of the machine
meets all of them; times are those of the first rank (the source). python benchmarks/broadcast.py [rounds]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
from hal_conformance.ranks.processes import Rank, RankPool

SLOTS, DRAFTS, CALLS = 128, 5, 20
LIMIT, FASTER = 1.2, 2.7
"""Times one bare broadcast at most; times faster than four of them at least."""
SLICE = 1000.0
"""Microseconds: a call that takes longer waited for another process to use up its time slice (4 ms), which says more
of the machine than of the call. The quiet median leaves such calls out; it is what the limit is held against."""


def measure(rank: Rank, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, by way; run on every rank."""
    import paddle.distributed as dist
    from hal_core.devices.cpu import CpuPlugin
    from hal_core.devices.paddle.ranks.groups import open_groups
    from hal_core.group import Group
    from hal_core.runtime.bound import bind
    from hal_core.slots.fields import StateConfig

    open_groups([range(rank.size)])
    group = Group(tuple(range(rank.size)), rank.rank)
    device = bind(CpuPlugin.open(0, {}))
    state = device.state(StateConfig(num_slots=SLOTS, max_model_len=256, max_draft_tokens=DRAFTS))
    stream = device.default_stream
    names = ("accept_tokens", "accept_num", "step_idx", "stop_flags")  # what FastDeploy broadcasts one by one
    fields = [_tensor(np.zeros(SLOTS * state.layout.fields[n].stride, np.uint8)) for n in names]
    whole = _tensor(np.zeros(state.broadcast_range().nbytes, np.uint8))

    def bare() -> None:
        dist.broadcast(whole, 0)

    def ours() -> None:
        device.broadcast_tokens(state=state, group=group, stream=stream).wait()

    def four() -> None:
        for tensor in fields:
            dist.broadcast(tensor, 0)

    times: dict[str, list[float]] = {"bare": [], "broadcast_tokens": [], "four broadcasts": []}
    for _ in range(rounds):
        for name, way in (("bare", bare), ("broadcast_tokens", ours), ("four broadcasts", four)):
            times[name] += _timed(way)
    device.close()
    return times


def _tensor(array: np.ndarray[Any, Any]) -> Any:  # noqa: ANN401 (a Paddle tensor)
    import paddle

    return paddle.to_tensor(array, place=paddle.CPUPlace())


def _timed(way: Callable[[], None]) -> list[float]:
    for _ in range(3):
        way()
    found = []
    for _ in range(CALLS):
        begin = perf_counter_ns()
        way()
        found.append((perf_counter_ns() - begin) / 1000)
    return found


def main(rounds: int) -> int:
    """Print the table; exit code 1 when a limit is missed."""
    with RankPool(2) as pool:
        times = pool.run(measure, rounds, timeout=300)[0]
    quiet = {name: [t for t in found if t < SLICE] for name, found in times.items()}
    median = {name: float(np.median(found)) for name, found in quiet.items()}
    for name, found in times.items():
        print(
            f"{name:18} quiet median {median[name]:6.1f} us, {median[name] / median['bare']:4.2f} x bare (all calls: "
            f"median {np.median(found):6.1f}, p99 {np.percentile(found, 99):7.1f} us; "
            f"{100 - 100 * len(quiet[name]) / len(found):.0f} % met a time slice)"
        )
    ratio = median["broadcast_tokens"] / median["bare"]
    faster = median["four broadcasts"] / median["broadcast_tokens"]
    print(f"limit {LIMIT} x bare: {'met' if ratio <= LIMIT else 'MISSED'}")
    print(f"{faster:.2f} x faster than four, at least {FASTER}: {'met' if faster >= FASTER else 'MISSED'}")
    return int(ratio > LIMIT or faster < FASTER)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
