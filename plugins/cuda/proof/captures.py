"""Hooks on one thread beside graph captures on another, in every capture mode; an update in a graph, replayed.

    python plugins/cuda/proof/captures.py [rounds]

Runs on both paths ("python" is the fallback). Between the begin and the end of a capture each round calls hooks:
insertions, values, an update, an output, with growing pinned memory and a second device that opens and closes. Then the
graph is launched: it must be valid, its bytes right, and the state equal to the cpu device's. As a control, the last
runs do not exchange the thread's capture mode: in the mode "global" that must invalidate the capture. Status 1 if any
check fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hal_core import (
    BoundDevice,
    ByteRange,
    CapturedUpdate,
    MemorySink,
    Request,
    SamplingParams,
    SlotState,
    StateConfig,
    Step,
    TaskBatch,
    View,
    bind,
)
from hal_core.devices import dtype_of
from hal_core.devices.cpu import CpuPlugin
from hal_cuda import CudaPlugin, staged_requests
from hal_cuda.driver import Driver

SIZES = StateConfig(num_slots=8, max_model_len=700, block_size=16, max_draft_tokens=2)
MODES = {"global": 0, "thread-local": 1, "relaxed": 2}
WORDS = 4096
TOKENS = "sampled_token_ids"
PARAMS = SamplingParams(max_tokens=40, eos_token_ids=(3,), stop_sequences=((7, 8),))


class Captures:
    """A thread that captures: each graph writes ``WORDS`` words."""

    def __init__(self, driver: Driver) -> None:
        self.api, self.ok = driver.api, driver.ok
        self._thread = ThreadPoolExecutor(1)
        self._on(self._prepare)

    def _on(self, work: Callable[..., Any], *given: Any) -> Any:  # noqa: ANN401
        return self._thread.submit(work, *given).result(60)

    def _prepare(self) -> None:
        ok, api = self.ok, self.api
        context = ok(api.cuDevicePrimaryCtxRetain(ok(api.cuDeviceGet(0), "cuDeviceGet")), "retain")
        ok(api.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        self.stream = int(ok(api.cuStreamCreate(1), "cuStreamCreate"))
        self.address = int(ok(api.cuMemAlloc(WORDS * 4), "cuMemAlloc"))

    def begin(self, mode: str, number: int) -> None:
        """Begin a capture and queue the first half of its work."""
        self._on(self._begin, MODES[mode], number)

    def _begin(self, mode: int, number: int) -> None:
        api = self.api
        self.ok(api.cuStreamBeginCapture(self.stream, api.CUstreamCaptureMode(mode)), "cuStreamBeginCapture")
        self.ok(api.cuMemsetD32Async(self.address, number, WORDS // 2, self.stream), "cuMemsetD32Async")

    def end(self, number: int) -> str:
        """Queue the other half, end the capture and launch the graph; return the fault, or ""."""
        return str(self._on(self._end, number))

    def _end(self, number: int) -> str:
        ok, api, half = self.ok, self.api, WORDS // 2
        api.cuMemsetD32Async(self.address + half * 4, number, half, self.stream)
        status, graph = api.cuStreamEndCapture(self.stream)
        if int(status):
            return f"spoilt: {status.name}"
        run = ok(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        ok(api.cuGraphLaunch(run, self.stream), "cuGraphLaunch")
        ok(api.cuStreamSynchronize(self.stream), "cuStreamSynchronize")
        found = np.empty(WORDS, np.uint32)
        ok(api.cuMemcpyDtoH(found.ctypes.data, self.address, found.nbytes), "cuMemcpyDtoH")
        api.cuGraphExecDestroy(run)
        api.cuGraphDestroy(graph)
        return "" if (found == number).all() else "the graph's bytes are wrong"


def opened(path: str) -> BoundDevice:
    """Open a device with little pinned memory, so that it has to grow."""
    os.environ["HAL_CUDA_NATIVE"] = str(int(path == "native"))
    return bind(CudaPlugin.open(0, {"ring_start": 4096}))


def contents(bound: BoundDevice, state: SlotState) -> dict[str, Any]:
    """Return all fields but the numbers of staged_requests."""
    span = ByteRange(0, state.layout.nbytes)
    copied = bound.copy_out(memory=state.memory, parts=[span], stream=bound.default_stream)
    copied.wait(30)
    return {name: c.copy() for name, c in state.columns(copied.data[0], span).items() if name != "request_serial"}


def hooks(bound: BoundDevice, number: int, slots: int = 8) -> tuple[list[Any], dict[str, Any]]:
    """Run one step with new requests; return the record's rows, and the state's fields."""
    state, stream = bound.state(SIZES), bound.default_stream
    prompts = np.random.default_rng(number).integers(10, 3000, (slots, 600))
    requests = [state.admit(Request(f"r{i}", prompt, PARAMS)) for i, prompt in enumerate(prompts)]
    batch = TaskBatch.prefill(list(range(slots)), requests, [600] * slots, [np.arange(38, dtype=np.int32)] * slots)
    ticket = bound.insert_tasks(state=state, tasks=batch, stream=stream)
    ticket.done()
    bound.async_set_value(target=state.view("token_ids")[:, 650:], value=prompts[:, :50], stream=stream)
    bound.async_set_value(target=state.view("temperature")[3], value=0.25, stream=stream)
    bound.async_set_value(target=state.view(TOKENS), value=np.arange(20, 20 + slots), stream=stream)
    step = Step(number, {"target": np.arange(slots)})
    bound.update_inputs(state=state, step=step, stream=stream)
    record = state.take(bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream))
    ticket.wait()
    stream.synchronize()
    return [(row.request_id, row.tokens.tolist()) for row in record.rows()], contents(bound, state)


def differs(found: Any, should: Any) -> str:  # noqa: ANN401
    """Return how a result differs from the cpu device's, or ""."""
    if found[0] != should[0]:
        return "the record differs"
    wrong = [name for name, column in should[1].items() if not np.array_equal(found[1][name], column)]
    return f"fields differ: {wrong}" if wrong else ""


def inside_captures(path: str, mode: str, rounds: int, cpu: BoundDevice) -> str:
    """Call hooks inside captures; return the first fault, or ""."""
    with opened(path) as bound:
        captures = Captures(bound.device.driver)  # type: ignore[attr-defined]
        for number in range(1, rounds + 1):
            captures.begin(mode, number)
            try:
                with opened(path) as second:
                    wrong = differs(hooks(bound, number), should := hooks(cpu, number))
                    wrong = wrong or differs(hooks(second, number), should)
            except (RuntimeError, ValueError) as error:
                wrong = str(error)
            wrong = captures.end(number) or wrong
            if wrong:
                return f"round {number}: {wrong}"
        staged = getattr(bound.device, "staged_requests", None)  # only the native path stages requests at admission
        if staged is not None and staged.held <= staged_requests.CHUNK:
            return "pinned memory did not grow"
    return ""


def at_once(path: str, mode: str, rounds: int, cpu: BoundDevice) -> str:
    """Capture continuously on one thread and call hooks on this one, without waits between them."""
    with opened(path) as bound:
        captures, stop, wrong, count = Captures(bound.device.driver), threading.Event(), [], 0  # type: ignore[attr-defined]

        def capture() -> None:
            nonlocal count
            while not stop.is_set():
                count += 1
                captures.begin(mode, count)
                if difference := captures.end(count):
                    wrong.append(f"capture {count}: {difference}")

        thread = threading.Thread(target=capture)
        thread.start()
        try:
            for number in range(1, rounds + 1):
                if difference := differs(hooks(bound, number), hooks(cpu, number)):
                    wrong.append(f"round {number}: {difference}")
        except (RuntimeError, ValueError) as error:
            wrong.append(str(error))
        finally:
            stop.set()
            thread.join(60)
    return wrong[0] if wrong else "" if count > rounds else f"{count} captures alone"


def replayed(path: str, steps: int, cpu: BoundDevice) -> str:
    """Replay a worker's graph of token copies and the update, with insertions between the launches."""
    with opened(path) as bound:
        driver, stream = bound.device.driver, bound.device.stream()  # type: ignore[attr-defined]
        api, ok, states = driver.api, driver.ok, [bound.state(SIZES), cpu.state(SIZES)]
        view = states[0].view(TOKENS)
        model = View.contiguous(bound.device.allocate(64), 0, (8, 1), dtype_of("int64"))
        ok(api.cuStreamBeginCapture(stream.handle, api.CUstreamCaptureMode(0)), "cuStreamBeginCapture")
        place = view.memory.address + view.offset
        ok(api.cuMemcpyDtoDAsync(place, model.memory.address, 64, stream.handle), "cuMemcpyDtoDAsync")
        captured = CapturedUpdate(bound, state=states[0], stream=stream)
        graph = ok(api.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
        run = ok(api.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")

        def launch() -> None:
            ok(api.cuGraphLaunch(run, stream.handle), "cuGraphLaunch")

        streams, launches = (stream, cpu.default_stream), bound.counters().launches
        for number in range(steps):
            tokens, step, rows = np.arange(8) + 20 + number, Step(number, {"target": np.arange(8)}), []
            for device, state, own in zip((bound, cpu), states, streams, strict=True):
                if number % 8 < 4:
                    slots = [number % 8, number % 8 + 4]
                    state.release(slots)
                    new = [state.admit(Request(f"{number}-{slot}", [5 + slot] * 30, PARAMS)) for slot in slots]
                    batch = TaskBatch.prefill(slots, new, [30, 30], [[1, 2]] * 2)
                    device.insert_tasks(state=state, tasks=batch, stream=own)
                target = model if device is bound else state.view(TOKENS)
                device.async_set_value(target=target, value=tokens[:, None], stream=own)
                if device is bound:
                    ticket = captured.replay(step=step, stream=own, launch=launch)
                else:
                    cpu.update_inputs(state=state, step=step, stream=own)
                record = state.take(device.save_output(state=state, step=step, sink=MemorySink(), stream=own))
                rows.append([(row.request_id, row.status, row.tokens.tolist()) for row in record.rows()])
            ticket.wait(30)
            wrong = differs((rows[0], contents(bound, states[0])), (rows[1], contents(cpu, states[1])))
            if wrong:
                return f"step {number}: {wrong}"
        if states[0].updates != states[1].updates or bound.counters().launches - launches < steps:
            return "the updates were not counted"
        with contextlib.suppress(ValueError):
            api.cuStreamBeginCapture(stream.handle, api.CUstreamCaptureMode(0))
            bound.update_inputs(state=states[0], step=Step(steps, {"target": np.arange(8)}), stream=stream)
            return "a captured stream was not refused"
        return "" if int(api.cuStreamEndCapture(stream.handle)[0]) == 0 else "the refusal has spoilt the capture"


def main(words: list[str]) -> int:
    """Run all cases and print a line for each."""
    rounds, failed = int(words[0]) if words else 20, 0
    staged_requests.CHUNK = 1 << 14
    with bind(CpuPlugin.open(0, {})) as cpu:

        def report(what: str, wrong: str) -> None:
            nonlocal failed
            failed += bool(wrong)
            print(f"{what:70s} {'WRONG: ' + wrong if wrong else 'ok'}", flush=True)

        for path in ("python", "native"):
            for mode in MODES:
                report(
                    f"{path}: {rounds} captures ({mode}), a round of hooks in each",
                    inside_captures(path, mode, rounds, cpu),
                )
                report(f"{path}: captures ({mode}) at the same time, {rounds} rounds", at_once(path, mode, rounds, cpu))
            report(f"{path}: {2 * rounds} steps of a graph with the update in it", replayed(path, 2 * rounds, cpu))
        Driver.during_captures = lambda driver: contextlib.nullcontext()  # type: ignore[method-assign, assignment, return-value]
        for path in ("python", "native"):
            wrong = inside_captures(path, "global", 1, cpu)
            report(f"{path}, without the exchange of the mode (global): {wrong}", "" if wrong else "it was not spoilt")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
