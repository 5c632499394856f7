"""Requests that arrive as a Poisson process at 80 % of saturation: hal's engine and the plain loop, quiet and beside a
busy Python thread."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .loops import LOOPS, LoadRequest, Run
from .node import Node, busy_threads, decoder_of, opened

SHAPE, SLOTS, SECONDS, SHARE = "8B", 128, 60.0, 0.8
PROMPTS, ANSWERS = (64, 512), (64, 256)
"""Tokens, uniformly drawn."""
EDGE = 5.0
"""Seconds at the beginning and the end of which no request is counted."""


def drawn(count: int, rate: float, seed: int) -> list[LoadRequest]:
    """Requests at ``rate`` a second; 0: all at once."""
    draw = np.random.default_rng(seed)
    due = np.cumsum(draw.exponential(1 / rate, count)) if rate else np.zeros(count)
    lengths, answers = (draw.integers(low, high + 1, count) for low, high in (PROMPTS, ANSWERS))
    return [
        LoadRequest(f"r{n}", draw.integers(8, 400, lengths[n]).astype(np.int32), int(answers[n]), float(due[n]))
        for n in range(count)
    ]


def saturation(node: Node) -> float:
    """Requests a second that the plain loop serves while some always wait."""
    load = drawn(4 * node.slots, 0.0, 3)
    taken = LOOPS["plain"](node, load, lambda run: False).taken
    part = taken[len(taken) // 4 : len(taken) // 2]
    tokens = sum(len(names) for _, names in part[1:]) / (part[-1][0] - part[0][0])
    return tokens / (sum(ANSWERS) / 2)


def figures(run: Run, load: list[LoadRequest], seconds: float) -> dict[str, Any]:
    """Of the requests that were due in the counted time."""
    times: dict[str, list[float]] = {}
    for at, names in run.taken:
        for name in names:
            times.setdefault(name, []).append(at)
    counted = [one for one in load if EDGE <= one.due < seconds - EDGE]
    first = np.array([times[one.name][0] - one.due for one in counted if one.name in times]) * 1e3
    between = np.concatenate([np.diff(times[one.name]) for one in counted if one.name in times] or [np.zeros(1)]) * 1e3
    inside = [len(names) for at, names in run.taken if EDGE <= at < seconds - EDGE]
    return {
        "tokens_per_s": sum(inside) / (seconds - 2 * EDGE),
        "first_ms": _parts(first),
        "between_ms": _parts(between),
        "requests": len(counted),
        "without_token": sum(one.name not in times for one in counted),
        "most_waiting": run.most_waiting,
    }


def _parts(values: Any) -> list[float]:  # noqa: ANN401 (an array)
    return [float(np.percentile(values, part)) if len(values) else float("nan") for part in (50, 99)]


def measure(shape: str = SHAPE, slots: int = SLOTS, seconds: float = SECONDS) -> dict[str, Any]:
    """Each loop once in each surrounding, with the same requests."""
    with opened(decoder_of(shape), slots) as node:
        LOOPS["plain"](node, drawn(slots, 0.0, 5), lambda run: len(run.taken) > 20)
        rate = SHARE * saturation(node)
        load, rows = drawn(int(rate * seconds), rate, 4), []
        for busy in (0, 1):
            for loop in LOOPS:
                with busy_threads(busy):
                    run = LOOPS[loop](node, load, lambda run: bool(run.taken) and run.taken[-1][0] > seconds)
                rows.append({"loop": loop, "busy": busy} | figures(run, load, seconds))
                print(rows[-1], file=sys.stderr, flush=True)
    return {"shape": shape, "slots": slots, "seconds": seconds, "rate": rate, "rows": rows}
