"""Single calls: async_set_value against torch and the raw driver, update_inputs, and what save_output costs where."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.output.sinks import MemorySink, PendingOutput
from hal_core.slots.step import Step

from .rig import SLOTS, Rig, median, quiet, spread

MEGABYTE = 1 << 20
PAUSE = 20
"""Calls between two waits for the GPU, so that no launch queue fills."""
Call = Callable[[], object]


def _timed(calls: dict[str, Call], rounds: int) -> dict[str, dict[str, Any]]:
    """Host microseconds of each call, the calls taking turns in short rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    with quiet():
        for at in range(rounds + 1):
            for name, call in calls.items():
                torch.cuda.synchronize()
                for _ in range(PAUSE):
                    begin = perf_counter_ns()
                    call()
                    if at:
                        found[name].append((perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return {name: {"host_us": median(times), "p10_p90": spread(times)} for name, times in found.items()}


def _total(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds from the call until the GPU has done it."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    with quiet():
        for at in range(rounds + 3):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = perf_counter_ns()
                call()
                torch.cuda.current_stream().synchronize()
                if at >= 3:
                    found[name].append((perf_counter_ns() - begin) / 1e3)
    return {name: median(times) for name, times in found.items()}


def set_values(rig: Rig, rounds: int) -> dict[str, Any]:
    """A scalar, a row of 64 tokens, 1 MB; each by hal, by torch from pinned memory, and by the bare driver."""
    device, stream, driver = rig.device, rig.stream, rig.device.device.driver
    memory = device.device.allocate(MEGABYTE)
    large = View.contiguous(memory, 0, (MEGABYTE // 8,), dtype_of("int64"))
    scalar, row = rig.state.view("temperature")[3], rig.state.view("token_ids")[3, :64]
    values = np.arange(MEGABYTE // 8)
    pinned = torch.from_numpy(values).pin_memory()
    there = torch.zeros(MEGABYTE // 8, dtype=torch.int64, device="cuda")
    one, few = torch.tensor(0.5).pin_memory(), torch.arange(64).pin_memory()
    one_there, few_there = torch.zeros((), device="cuda"), there[:64]
    upload, handle = driver.api.cuMemcpyHtoDAsync, stream.handle

    def ours(target: object, value: object) -> Call:
        return lambda: device.async_set_value(target=target, value=value, stream=stream)

    def copied(target: torch.Tensor, value: torch.Tensor) -> Call:
        return lambda: target.copy_(value, non_blocking=True)

    def raw(target: torch.Tensor, value: torch.Tensor) -> Call:
        to, source, nbytes = target.data_ptr(), value.data_ptr(), value.numel() * value.element_size()
        return lambda: upload(to, source, nbytes, handle)

    staging = pinned.numpy()

    def kept_apart() -> None:
        staging[:] = values
        upload(there.data_ptr(), pinned.data_ptr(), MEGABYTE, handle)

    calls: dict[str, Call] = {
        "scalar: hal": ours(scalar, 0.5),
        "scalar: hal, torch tensor as target": ours(one_there, 0.5),
        "scalar: torch copy_ from pinned": copied(one_there, one),
        "scalar: torch fill_": lambda: one_there.fill_(0.5),
        "scalar: driver copy from pinned": raw(one_there, one),
        "row of 64: hal": ours(row, values[:64]),
        "row of 64: torch copy_ from pinned": copied(few_there, few),
        "row of 64: driver copy from pinned": raw(few_there, few),
        "1 MB: hal": ours(large, values),
        "1 MB: torch copy_ from pinned": copied(there, pinned),
        "1 MB: driver copy from pinned": raw(there, pinned),
        "1 MB: memcpy to pinned, driver copy": kept_apart,
    }
    found = _timed(calls, rounds)
    for name, total in _total(calls, rounds).items():
        found[name]["total_us"] = total
    return found


class Unread:
    """Sink that drops outputs without resolving them, to time the hook alone."""

    session = 1

    def put(self, pending: PendingOutput) -> None:
        pending.complete(None)

    def close(self, timeout: float) -> None:
        """Return at once."""


def output(rig: Rig, rounds: int) -> dict[str, Any]:
    """Host and GPU cost of ``update_inputs`` and ``save_output`` at 128 running slots."""
    device, state, stream = rig.device, rig.state, rig.stream
    step = Step(1, {"target": np.arange(SLOTS)})
    sink, discard = MemorySink(threaded=True), Unread()

    def update_inputs() -> None:
        device.update_inputs(state=state, step=step, stream=stream)

    def save() -> None:
        device.save_output(state=state, step=step, sink=discard, stream=stream)

    def save_threaded() -> None:
        device.save_output(state=state, step=step, sink=sink, stream=stream)

    def both() -> None:
        save()
        update_inputs()

    def nothing() -> None:
        """The two events alone."""

    calls: dict[str, Call] = {
        "update_inputs": update_inputs,
        "save_output, discarded": save,
        "save_output, a sink with a thread": save_threaded,
    }
    host = _timed(calls, max(3, rounds // 4))
    gpu = {}
    for name, work in (("nothing", nothing), ("save_output", save), ("update_inputs", update_inputs), ("both", both)):
        times = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            rig.stand_in.launch(2.0, stream.handle)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        gpu[name] = median(times)
    sink.close(10.0)
    return {"host": host, "gpu_us_on_compute_stream": gpu}
