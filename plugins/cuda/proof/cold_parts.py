"""Where an insertion's host time goes, hot and cold: its native calls, and Python between them.

    python -m hal_cuda.building && python plugins/cuda/proof/cold_parts.py [rounds] [--stand-in]

Medians, us. Cold: 48 MB were touched and 1 ms was slept before each insertion. Each mark adds some 0.3 us.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from hal_core.slots import native_columns
from hal_core.slots.state import SlotState
from native_bench import Case, cases, opened

Marks = list[tuple[str, int]]


def marked(call: Callable[..., Any], name: str, marks: Marks) -> Callable[..., Any]:
    """Return the call with a mark before and after it."""

    def within(*given: Any) -> Any:  # noqa: ANN401 (the call's)
        marks.append((f"before {name}", time.perf_counter_ns()))
        found = call(*given)
        marks.append((name, time.perf_counter_ns()))
        return found

    return within


def parts(case: Case, rounds: int, marks: Marks, touched: Any) -> dict[str, float]:  # noqa: ANN401 (an array, or None)
    """Return the median of each part of a case, and of all of it."""
    found: dict[str, list[float]] = {}
    for number in range(rounds + 5):
        given = case[1]()
        if touched is not None:
            touched += 1
            time.sleep(1e-3)
        marks.clear()
        last = begin = time.perf_counter_ns()
        case[2](given)
        marks.append(("after all", time.perf_counter_ns()))
        for name, at in marks if number >= 5 else ():
            found.setdefault(name, []).append((at - last) / 1e3)
            last = at
        if number >= 5:
            found.setdefault("together", []).append((last - begin) / 1e3)
    return {name: median(times) for name, times in found.items()}


def main() -> None:
    """Print a table for each number of requests."""
    rounds = next((int(word) for word in sys.argv[1:] if word.isdecimal()), 100)
    marks, memory = Marks(), np.zeros(48 << 20, np.uint8)
    with opened("native", stand_in="--stand-in" in sys.argv) as bound:
        insertions = [case for case in cases(bound) if case[0].startswith("insert")]
        native: Any = native_columns
        native.of_lists = marked(native.of_lists, "columns", marks)
        insertion: Any = bound.device.insertion  # type: ignore[attr-defined]
        insertion._enter = marked(insertion._enter, "entries and driver", marks)
        for twin in [one.host_table.twin for one in gc.get_objects() if isinstance(one, SlotState)]:
            twin._sound, twin._commit = marked(twin._sound, "check", marks), marked(twin._commit, "booking", marks)
        for case in insertions:
            hot, cold = (parts(case, rounds, marks, touched) for touched in (None, memory))
            print(f"{case[0]}\n" + "\n".join(f"  {name:28}{hot[name]:8.1f}{cold[name]:8.1f}" for name in hot))


if __name__ == "__main__":
    main()
