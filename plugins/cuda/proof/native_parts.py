"""Host time of a hook's parts on the native path: Python's nested parts, and the driver's calls.

    python -m hal_cuda.building && python plugins/cuda/proof/native_parts.py [rounds] [--stand-in]

Microseconds, medians over the rounds: each part's time without the parts inside it, with a timer of 0.2 us around each.
The driver's calls are timed in C, between the native part and the driver. Cases and ``--stand-in`` as native_bench.py.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import native_bench
from hal_core import TaskBatch
from hal_core.runtime.bound import BoundDevice
from hal_cuda import building, native

TIMED = """
#include <stdint.h>
#include <time.h>
typedef uint64_t u64; typedef uint32_t u32; typedef void *P;
P real[11]; double spent[11]; long made[11];
static double now(void) {
  struct timespec t;
  return clock_gettime(CLOCK_MONOTONIC, &t), t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}
#define CALL(i, types, params, given) int call##i params { double t = now(); int s = ((int (*) types)real[i]) given; \\
  spent[i] += now() - t; made[i]++; return s; }
CALL(0, (u64, P, u64, P), (u64 a, P b, u64 c, P d), (a, b, c, d))
CALL(1, (P, u64, u64, P), (P a, u64 b, u64 c, P d), (a, b, c, d))
CALL(2, (u64, u32, u64, P), (u64 a, u32 b, u64 c, P d), (a, b, c, d))
CALL(3, (P, u32, u32, u32, u32, u32, u32, u32, P, P *, P *),
     (P a, u32 b, u32 c, u32 d, u32 e, u32 f, u32 g, u32 h, P i, P *j, P *k), (a, b, c, d, e, f, g, h, i, j, k))
CALL(4, (P, P), (P a, P b), (a, b))
CALL(5, (P), (P a), (a))
CALL(6, (P, u32), (P a, u32 b), (a, b))
CALL(7, (P), (P a), (a))
CALL(8, (P, P, u32), (P a, P b, u32 c), (a, b, c))
CALL(9, (P, P), (P a, P b), (a, b))
CALL(10, (P), (P a), (a))
"""


class Parts:
    """The nesting of timed parts: each part's own time, by name."""

    def __init__(self) -> None:
        self.own: defaultdict[str, float] = defaultdict(float)
        self._inside = [0]

    def around(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the call with a timer."""
        own, inside = self.own, self._inside

        def timed(*given: Any, **named: Any) -> Any:  # noqa: ANN401
            inside.append(0)
            begin = perf_counter_ns()
            try:
                return call(*given, **named)
            finally:
                taken = perf_counter_ns() - begin
                own[name] += (taken - inside.pop()) / 1e3
                inside[-1] += taken

        return timed

    def put(self, owner: Any, *names: str) -> None:  # noqa: ANN401
        """Time these calls of an object."""
        for name in names:
            label = f"{type(owner).__name__}.{name}"
            setattr(owner, name, self.around(getattr(owner, name), label))


def driver_timed() -> Any:  # noqa: ANN401 (a library)
    """Put a timer in C between the native part and the driver; return the library with the times."""
    folder = Path(tempfile.mkdtemp(prefix="hal-parts-"))
    (folder / "timed.c").write_text(TIMED, encoding="utf-8")
    command = [*building.compiler(), "-O2", "-shared", "-fPIC", str(folder / "timed.c"), "-o", str(folder / "timed.so")]
    subprocess.run(command, check=True)
    library, found = ctypes.CDLL(str(folder / "timed.so")), native.functions

    def functions(driver: ctypes.CDLL | None = None) -> tuple[int, ...]:
        real = (ctypes.c_void_p * len(native.CALLS)).in_dll(library, "real")
        real[:] = found(driver)
        return tuple(
            int(ctypes.cast(getattr(library, f"call{at}"), ctypes.c_void_p).value or 0) for at in range(len(real))
        )

    native.functions = functions  # type: ignore[assignment]
    return library


def instrument(bound: BoundDevice, parts: Parts) -> None:
    """Time the parts of every hook."""
    device: Any = bound.device
    parts.put(bound.policy, "insert_tasks", "async_set_value", "save_output")
    parts.put(device, "insert_tasks", "async_set_value", "save_output", "copy_out", "enqueue_copies")
    parts.put(device.copies, "copy_out", "_copy")
    parts.put(device.insertion, "submit", "_enter_batch", "_enter")
    parts.put(device.writer, "set_value", "_fill_word", "_run", "_put")
    parts.put(device.events, "take")
    parts.put(device.blocks, "take")
    parts.put(device.reads, "order", "add")
    parts.put(device._runtime, "check_capture", "submit_copy_out")


def measured(case: native_bench.Case, parts: Parts, timer: Any, rounds: int) -> dict[str, float]:  # noqa: ANN401
    """Return the medians of one case."""
    _, prepare, act = case
    spent, made = ((kind * len(native.CALLS)).in_dll(timer, name) for kind, name in KINDS)
    found: defaultdict[str, list[float]] = defaultdict(list)
    act = parts.around(act, "the rest")
    with native_bench.beside(busy=False):
        for at in range(rounds + 5):
            given = prepare()
            parts.own.clear()
            spent[:], made[:] = [0] * len(native.CALLS), [0] * len(native.CALLS)
            begin = perf_counter_ns()
            act(given)
            whole = (perf_counter_ns() - begin) / 1e3
            if at >= 5:
                found["whole"].append(whole)
                for name, own in parts.own.items():
                    found[name].append(own)
                for name, count, taken in zip(native.CALLS, made, spent, strict=True):
                    if count:
                        found[f"   driver: {name} x {count}"].append(taken)
    return {name: statistics.median(times) for name, times in found.items() if len(times) > rounds // 2}


KINDS = (ctypes.c_double, "spent"), (ctypes.c_long, "made")


def main(words: list[str]) -> None:
    """Measure and print."""
    rounds = int(next((word for word in words if word.isdigit()), "200"))
    timer, parts = driver_timed(), Parts()
    with native_bench.opened("native", stand_in="--stand-in" in words) as bound:
        cases = list(native_bench.cases(bound))
        instrument(bound, parts)
        prefill = TaskBatch.prefill
        TaskBatch.prefill = parts.around(prefill, "TaskBatch.prefill")  # type: ignore[method-assign]
        TaskBatch.of = parts.around(TaskBatch.of, "TaskBatch.of")  # type: ignore[method-assign]
        parts.put(native.NativeHostTable, "sound", "commit")
        for case in cases:
            found = measured(case, parts, timer, rounds)
            print(f"{case[0]}: {found.pop('whole'):.1f} us", flush=True)
            for name, own in found.items():
                print(f"    {name:45s}{own:8.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
