"""The cpu device's hooks against plain Paddle slice assignment and direct calls, in one run.

    python benchmarks/hooks.py

Prints one table: median, and the bound where the project has set itself one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from functools import partial

import numpy as np
from hal_core import Request, SamplingParams, StateConfig, TaskBatch, admit, hookimpl
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import CpuDevice
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.slots.fields import ROW_FIELDS, STATE_TABLE
from hal_core.slots.state import SlotState

SLOTS, WIDTH, PROMPT = 128, 8192, 64
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=100, eos_token_ids=(2,))


def median_us(call: Callable[[], object], *, inner: int = 1, rounds: int = 30) -> float:
    """Median over ``rounds`` of the mean time of ``inner`` calls, in microseconds."""
    times = []
    for _ in range(rounds + 3):
        begin = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - begin) / inner * 1e6)
    return statistics.median(times[3:])


def insertion(bound: BoundDevice, state: SlotState) -> tuple[float, float]:
    """``(admission of one request, insertion of 128)`` in microseconds, the batch object included."""
    prompt = list(range(PROMPT))
    slots, lengths = list(range(SLOTS)), [PROMPT] * SLOTS
    blocks = [list(range(4 * i, 4 * i + 4)) for i in range(SLOTS)]
    admissions, insertions = [], []
    for _ in range(40):
        begin = time.perf_counter()
        requests = [admit(Request(f"r{i}", prompt, PARAMS), state.layout) for i in range(SLOTS)]
        admissions.append((time.perf_counter() - begin) / SLOTS * 1e6)
        begin = time.perf_counter()
        batch = TaskBatch.prefill(slots, requests, lengths, blocks)
        bound.insert_tasks(state=state, tasks=batch, stream=bound.default_stream).wait()
        insertions.append((time.perf_counter() - begin) * 1e6)
        state.release(slots)
    return statistics.median(admissions[3:]), statistics.median(insertions[3:])


def slice_assignment() -> tuple[float, int]:
    """128 requests into the fields that an insertion writes, one Paddle slice assignment each; ``(us, fields)``."""
    import paddle

    sizes = StateConfig(num_slots=SLOTS, max_model_len=WIDTH)
    written = [f for f in STATE_TABLE if f.record or f.name in ROW_FIELDS]
    fields = []
    for field in written:
        width = sizes.width(field.width)
        value = np.zeros(min(width, PROMPT), field.dtype.storage) if width > 1 else np.zeros(1, field.dtype.storage)
        fields.append(
            (paddle.zeros([SLOTS, width], field.dtype.name), len(value), value if width > 1 else value.item())
        )

    def insert() -> None:
        for slot in range(SLOTS):
            for tensor, width, value in fields:
                tensor[slot : slot + 1, :width] = value

    return median_us(insert, rounds=8), len(fields)


def values(bound: BoundDevice, state: SlotState) -> dict[str, float]:
    """One ``async_set_value`` in microseconds: a scalar into a prepared view, a row of 64, and the dispatch alone."""
    device, stream = bound.device, bound.default_stream
    assert isinstance(device, CpuDevice)
    cell, row = state.view("temperature")[3], state.view("token_ids")[3, :64]
    tokens = np.arange(64)
    number = np.float32(0.5)
    times = {
        "scalar": median_us(lambda: bound.async_set_value(target=cell, value=0.5, stream=stream), inner=500),
        "row of 64": median_us(lambda: bound.async_set_value(target=row, value=tokens, stream=stream), inner=500),
    }
    hook = bound._hooks.async_set_value
    relayed = median_us(lambda: hook(device=device, target=cell, value=number, stream=stream), inner=500)
    direct = median_us(
        lambda: device.async_set_value(device=device, target=cell, value=number, stream=stream), inner=500
    )
    return times | {"dispatch": relayed - direct}


class Observer:
    """Sees every ``async_set_value`` and does nothing."""

    @hookimpl(wrapper=True)
    def async_set_value(self, target: object, value: object) -> Generator[None, object, object]:
        """Let the call through."""
        return (yield)


def observed() -> dict[str, float]:
    """The scalar again, in turn on three devices: the error of the measurement, and what one observer costs."""
    calls = {}
    for name in ("plain", "again", "observed"):
        bound = bind(CpuPlugin.open(0, {}))
        if name == "observed":
            bound.observe(Observer())
        cell = bound.state(StateConfig(num_slots=8, max_model_len=64)).view("temperature")[3]
        calls[name] = partial(bound.async_set_value, target=cell, value=0.5, stream=bound.default_stream)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(200):
        for name, call in calls.items():
            times[name].append(median_us(call, inner=50, rounds=1))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {name: medians[name] - medians["plain"] for name in ("again", "observed")}


def main() -> None:
    """Run and print everything."""
    bound = bind(CpuPlugin.open(0, {}))
    state = bound.state(StateConfig(num_slots=SLOTS, max_model_len=WIDTH))
    admission, inserted = insertion(bound, state)
    plain, fields = slice_assignment()
    single, more = values(bound, state), observed()
    rows = [
        ("admission of one request", admission, "<= 30"),
        (f"insert_tasks, {SLOTS} requests x {PROMPT} tokens", inserted, "<= 500"),
        (f"Paddle slice assignment, {SLOTS} requests, {fields} fields", plain, ""),
        ("ratio", plain / inserted, ">= 30"),
        ("async_set_value, scalar into a prepared view", single["scalar"], "<= 7"),
        ("async_set_value, row of 64", single["row of 64"], "<= 8"),
        ("hook dispatch over a direct call", single["dispatch"], "<= 3"),
        ("the same call again, more", more["again"], ""),
        ("one observer, more", more["observed"], "<= 3"),
    ]
    print(f"{'microseconds, medians':58s} {'here':>10s}  bound")
    for name, value, limit in rows:
        print(f"{name:58s} {value:10.1f}  {limit}")
    bound.close()


if __name__ == "__main__":
    main()
