"""Tokens a second of hal's engine and of the plain loop, in turn: long and short answers, overlapped and waiting, quiet
and beside busy Python threads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from .loops import LOOPS, LoadRequest, Run
from .node import SHORT_INTERVAL, Node, busy_threads, decoder_of, opened

ROUNDS, STEPS, PROMPT, LONGEST_ANSWER = 3, 150, 128, 800
SHORT = (8, 32)
NODES = (("8B", (128, 32)), ("1B", (32,)))
QUIET, ONE, FOUR, FOUR_SHORT = (0, None), (1, None), (4, None), (4, SHORT_INTERVAL)
LONG_WAYS = (
    *((loop, overlap, QUIET) for overlap in (True, False) for loop in LOOPS),
    *((loop, True, busy) for busy in (ONE, FOUR_SHORT) for loop in LOOPS),
)
SHORT_WAYS = tuple((loop, overlap, QUIET) for overlap in (True, False) for loop in LOOPS)


def long_answers(node: Node, loop: str, *, overlap: bool) -> float:
    """Tokens a second while every slot decodes."""
    tokens = np.random.default_rng(1).integers(8, 400, (node.slots, PROMPT)).astype(np.int32)
    load = [LoadRequest(f"r{number}", row, LONGEST_ANSWER) for number, row in enumerate(tokens)]

    steps = STEPS if node.runner.graphs else 20

    def enough(run: Run) -> bool:
        return len(run.taken) > steps and len(run.taken[-steps][1]) == node.slots

    taken = LOOPS[loop](node, load, enough, overlap=overlap).taken[-steps:]
    return sum(len(names) for _, names in taken[1:]) / (taken[-1][0] - taken[0][0])


def short_answers(node: Node, loop: str, *, overlap: bool) -> float:
    """Return the tokens a second of ten times as many requests as slots, most of which wait."""
    draw = np.random.default_rng(2)
    load = [
        LoadRequest(
            f"r{number}", draw.integers(8, 400, 16).astype(np.int32), int(draw.integers(SHORT[0], SHORT[1] + 1))
        )
        for number in range(10 * node.slots)
    ]
    taken = LOOPS[loop](node, load, lambda run: False, overlap=overlap).taken
    begun, last = SHORT[1], len(taken) - 2 * SHORT[1]
    return sum(len(names) for _, names in taken[begun + 1 : last]) / (taken[last - 1][0] - taken[begun][0])


def measure(
    shapes: Sequence[tuple[str, Sequence[int]]] = NODES, rounds: int = ROUNDS, only: str = ""
) -> dict[str, Any]:
    """All shapes; each way once a round, in turn."""
    rows: list[dict[str, Any]] = []
    for shape, sizes in shapes:
        decoder = decoder_of(shape)
        for slots in sizes:
            with opened(decoder, slots) as node:
                for answers, measured, ways in (
                    ("long", long_answers, LONG_WAYS),
                    ("short", short_answers, SHORT_WAYS),
                ):
                    if only not in ("", answers):
                        continue
                    rows += _rows({"shape": shape, "slots": slots, "answers": answers}, node, measured, ways, rounds)
                if only != "short":
                    case = {"shape": shape, "slots": slots, "answers": "long"}
                    rows += _rows(case, node, long_answers, (("hal", True, FOUR),), 1)
        del decoder
    return {"rows": rows}


def _rows(case: dict[str, Any], node: Node, measured: Any, ways: Any, rounds: int) -> list[dict[str, Any]]:  # noqa: ANN401
    found: dict[Any, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for at in range(len(ways)):
            loop, overlap, busy = way = ways[(at + number) % len(ways)]
            with busy_threads(*busy):
                found[way].append(measured(node, loop, overlap=overlap))
    rows = []
    for (loop, overlap, (threads, interval)), rates in found.items():
        how = {"loop": loop, "overlap": overlap, "busy": threads, "interval": interval}
        rows.append(case | how | {"tokens_per_s": median(rates), "rounds": rates})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows
