"""Regression checks for faults that this device once had on a GPU: a line for each, status 1 if one is back.

    python -m hal_cuda.building && python plugins/cuda/proof/faults.py [WORD ...]

It needs torch, and takes less than a minute. A word selects the cases whose name contains it. ``HAL_CUDA_NATIVE=0``
checks the fallback. To keep a stream busy, one of torch's kernels spins on it for a known time, so a call that waits
for the stream still returns.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hal_core import ByteRange, MemorySink, Request, StateConfig, Step, Task, TaskKind
from hal_core.errors import HalError, InvalidValue, OutOfMemory, TicketTimeout
from hal_core.runtime.bound import BoundDevice, bind
from hal_cuda import CudaPlugin

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=4)
MB, ROUNDS, COPIES, KEPT = 1 << 20, 20, 100_000, 100
LARGE = 64 * MB
"""Elements of a value that is larger than the staging ring; four bytes each."""
MISALIGNED = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry misaligned(.param .u64 where)
{
 .reg .u64 %rd<2>;
 .reg .u32 %r<2>;
 ld.param.u64 %rd1, [where];
 mov.u32 %r1, 1;
 st.global.u32 [%rd1+1], %r1;
 ret;
}
"""
Found = tuple[bool, str]
"""Whether the fault is present, and the observation."""


@cache
def torch() -> Any:  # noqa: ANN401 (a module without type information)
    """Load torch and the kernels that the cases use, as loading waits for the GPU."""
    module: Any = importlib.import_module("torch")
    for stream in (module.cuda.current_stream(), side()):
        with module.cuda.stream(stream):
            bool((module.full((MB,), 1.0, device="cuda") == 1.0).all())
    module.cuda._sleep(1000)
    module.cuda.synchronize()
    return module


@cache
def side() -> Any:  # noqa: ANN401 (torch's stream)
    """Return one of torch's streams beside its current one."""
    return importlib.import_module("torch").cuda.Stream()


@cache
def rate() -> float:
    """Return the cycles per second of torch's spinning kernel."""
    cuda = torch().cuda
    for cycles in (10**8, 4 * 10**8):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return float(4e8 / begin.elapsed_time(end) * 1e3)


def busy(stream: Any, seconds: float) -> None:  # noqa: ANN401 (a stream of the device)
    """Keep a stream computing for so many seconds."""
    cuda, cycles = torch().cuda, int(seconds * rate())
    with cuda.stream(cuda.ExternalStream(stream.handle)):
        cuda._sleep(cycles)


def filled(value: float) -> Any:  # noqa: ANN401 (a tensor)
    """Return a filled tensor, allocated and written on the other stream."""
    with torch().cuda.stream(side()):
        tensor = torch().full((MB,), value, device="cuda")
    side().synchronize()
    return tensor


@contextmanager
def opened(**options: object) -> Iterator[BoundDevice]:
    """Open a separate device for a case."""
    with bind(CudaPlugin.open(0, options)) as bound:
        yield bound


def pinned(bound: BoundDevice) -> int:
    """Return the bytes of page-locked memory that hal has from the driver, for all devices of the GPU."""
    return sum(bound.device._runtime._memory._locked.values())  # type: ignore[attr-defined]


def lazy(bound: BoundDevice) -> Found:
    """Tensors whose memory does not hold their elements."""
    stream, target = bound.device.stream(), filled(0.0)
    number = torch().tensor([1 + 2j, 3 - 4j])
    here, there = number.conj().imag, number.cuda().conj().imag
    bound.async_set_value(target=target[:2], value=here, stream=stream).wait(10)
    wrong = [] if target[:2].tolist() == here.tolist() else [f"from the host {target[:2].tolist()}"]
    others = {
        "of the GPU": there,
        "sparse": torch().eye(2).to_sparse(),
        "sparse there": torch().eye(2).cuda().to_sparse(),
    }
    for name, value in others.items():
        place = target[:4].view(2, 2) if name.startswith("sparse") else target[:2]
        try:
            bound.async_set_value(target=place, value=value, stream=stream).wait(10)
            if place.tolist() != value.resolve_neg().to_dense().tolist():
                wrong.append(f"{name}: {place.tolist()}")
        except InvalidValue:
            pass
        except (RuntimeError, TypeError) as error:
            wrong.append(f"{name}: {type(error).__name__}")
    return bool(wrong), "; ".join(wrong) or "resolved on the host, refused by name on the GPU"


def dropped_value(bound: BoundDevice) -> Found:
    """A value that is dropped right after the call, whose memory torch gives to the next tensor."""
    stream, target, wrong = bound.device.stream(), filled(0.0), 0
    for _ in range(ROUNDS):
        value = filled(7.0)
        busy(stream, 0.02)
        bound.async_set_value(target=target, value=value, stream=stream)  # no ticket, which might hold the tensor
        del value
        other = filled(-1.0)
        stream.synchronize(30)
        wrong += not bool((target == 7.0).all())
        del other
    return wrong > 0, f"{wrong} of {ROUNDS} overwritten"


def dropped_target(bound: BoundDevice) -> Found:
    """The same for a target."""
    stream, wrong = bound.device.stream(), 0
    for _ in range(ROUNDS):
        target = filled(0.0)
        busy(stream, 0.02)
        bound.async_set_value(target=target, value=7.0, stream=stream)
        del target
        other = filled(-1.0)
        stream.synchronize(30)
        wrong += not bool((other == -1.0).all())
        del other
    return wrong > 0, f"{wrong} of {ROUNDS} overwritten"


def full_queue(_: BoundDevice) -> Found:
    """Scalars on a busy stream, until its launch queue is full: an error after the deadline."""
    with opened(deadline=1.0) as bound:
        stream, target, worst = bound.device.stream(), bound.state(SIZES).view("temperature")[3], 0.0
        bound.async_set_value(target=target, value=0.5, stream=stream).wait(10)
        busy(stream, 5.0)
        for calls in range(3000):
            begin = time.monotonic()
            try:
                bound.async_set_value(target=target, value=0.5, stream=stream)
            except OutOfMemory:
                took = time.monotonic() - begin
                bad = took > 3 or worst > 1
                return bad, f"OutOfMemory at call {calls} after {took:.2f} s; before it at most {worst:.3f} s a call"
            worst = max(worst, time.monotonic() - begin)
        return True, f"3000 calls, no error, the slowest {worst:.2f} s"


def large_value(bound: BoundDevice) -> Found:
    """A value of 256 MB on a busy stream: the call does not wait, and has read the value when it returns."""
    stream, target = bound.device.stream(), torch().zeros(LARGE, device="cuda")
    value = np.arange(LARGE, dtype=np.float32)
    should = torch().from_numpy(value).cuda()
    torch().cuda.synchronize()
    busy(stream, 3.0)
    begin = time.monotonic()
    try:
        ticket = bound.async_set_value(target=target, value=value, stream=stream)
    except OutOfMemory:
        return True, f"OutOfMemory after {time.monotonic() - begin:.2f} s"
    took = time.monotonic() - begin
    value[:] = -1
    ticket.wait(30)
    right = bool(torch().equal(target, should))
    detail = f"returned after {took:.3f} s of the three; {'right' if right else 'WRONG values'}"
    return took > 1.5 or not right, detail


def threads(bound: BoundDevice) -> Found:
    """Hooks in a thread that did not open the device."""
    state, stream, met = bound.state(SIZES), bound.default_stream, []

    def calls() -> None:
        try:
            request = state.admit(Request("r", [1] * 9))
            task = Task(TaskKind.PREFILL, 1, request, 0, 9, [0, 1, 2])
            bound.insert_tasks(state=state, tasks=[task], stream=stream).wait(10)
            bound.async_set_value(target=state.view("temperature"), value=0.5, stream=stream).wait(10)
            step = Step(0, {"target": np.array([1], np.int32)})
            bound.update_inputs(state=state, step=step, stream=stream).wait(10)
            output: Any = bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream)
            state.take(output)
            bound.copy_out(memory=state.memory, parts=[ByteRange(0, 64)], stream=stream).wait(10)
        except Exception as error:  # noqa: BLE001 (each is a fault and is reported)
            met.append(f"{type(error).__name__}: {error}"[:110])

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join(60)
    return bool(met) or thread.is_alive(), met[0] if met else "all calls went through"


def copies(bound: BoundDevice) -> Found:
    """Copies out of many ranges without a write between: the next write checks few of them, however long it takes."""
    stream, state = bound.device.stream(), bound.state(StateConfig(num_slots=8, max_model_len=1 << 14))
    target = state.view("temperature")[3]
    bound.async_set_value(target=target, value=0.5, stream=stream).wait(10)
    for number in range(COPIES):
        part = ByteRange(8 * (number % (state.memory.nbytes // 8)), 8)
        bound.copy_out(memory=state.memory, parts=[part], stream=stream)
    stream.synchronize()
    kept, begin = len(bound.device.reads.under_way), time.perf_counter()  # type: ignore[attr-defined]
    ticket = bound.async_set_value(target=target, value=0.5, stream=stream)
    took = (time.perf_counter() - begin) * 1e3
    ticket.wait(10)
    return kept > KEPT, f"the next write after {COPIES} copies checks {kept} of them and takes {took:.2f} ms"


def time_out(bound: BoundDevice) -> Found:
    """A wait with a time limit on a busy stream."""
    stream, target = bound.device.stream(), bound.state(SIZES).view("temperature")
    busy(stream, 2.0)
    ticket, begin = bound.async_set_value(target=target, value=0.5, stream=stream), time.monotonic()
    try:
        ticket.wait(0.3)
        outcome = "no TicketTimeout"
    except TicketTimeout:
        outcome = "TicketTimeout"
    took = time.monotonic() - begin
    ticket.wait(30)
    return outcome != "TicketTimeout" or took > 1, f"{outcome} after {took:.2f} s"


def interrupt(_: BoundDevice) -> Found:
    """Ctrl-C while a process waits for a ticket of a stream that is busy for eight seconds."""
    with child("waits") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        time.sleep(0.5)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _errors = process.communicate(timeout=30)
        took = time.monotonic() - begin
    good = line.strip() == "waiting" and "interrupted" in output
    return not good or took > 4, f"the process ended {took:.2f} s after SIGINT" + (
        "" if good else f": {output[-90:]!r}"
    )


def waits() -> None:
    """Wait in the child process until the interrupt."""
    with opened() as bound:
        stream, target = bound.device.stream(), bound.state(SIZES).view("temperature")
        busy(stream, 8.0)
        ticket = bound.async_set_value(target=target, value=0.5, stream=stream)
        print("waiting", flush=True)
        try:
            ticket.wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            os._exit(130)  # like a process ended by a signal: closing the device would wait for its streams


def sticky(_: BoundDevice) -> Found:
    """A misaligned access corrupts the context: the device reports it, and refuses tensors of its memory from then
    on."""
    with child("spoils") as process:
        output, errors = process.communicate(timeout=60)
    good = output.split() == ["refused", "refused", "refused", "known"]
    return (
        not good,
        "state.tensor(), which is asked first, and writes are refused" if good else f"{output!r} {errors[-90:]!r}",
    )


def spoils() -> None:
    """Run a kernel that writes to a misaligned address, in the child process."""
    torch()
    bound = bind(CudaPlugin.open(0, {}))
    state, stream, driver = bound.state(SIZES), bound.device.stream(), bound.device.driver  # type: ignore[attr-defined]
    module = driver.ok(driver.on.cuModuleLoadData(MISALIGNED + b"\0"), "cuModuleLoadData")
    function = driver.ok(driver.on.cuModuleGetFunction(module, b"misaligned"), "cuModuleGetFunction")
    given = ((state.memory.address,), (ctypes.c_void_p,))
    driver.ok(driver.on.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.handle, given, 0), "cuLaunchKernel")
    target = state.view("temperature")

    def write() -> None:
        bound.async_set_value(target=target, value=0.5, stream=stream).wait(10)

    time.sleep(0.3)  # the kernel has failed; hal has made no call since
    for call in (lambda: state.tensor("temperature", "torch"), write, write):
        try:
            call()
            print("returned", flush=True)
        except HalError:
            print("refused", flush=True)
        except Exception as error:  # noqa: BLE001 (a fault that the parent reports)
            print(type(error).__name__, flush=True)
    print("known" if driver.broken else "unknown", flush=True)
    os._exit(0)  # a corrupted context cannot release memory


def speed(bound: BoundDevice) -> Found:
    """A value of 256 MB from pageable memory, by hal and by torch in turn; the best of four."""
    stream, target = bound.device.stream(), torch().zeros(LARGE, device="cuda")
    value, times = np.ones(LARGE, np.float32), {"torch": 9.9, "hal": 9.9}
    tensor = torch().from_numpy(value)
    for _ in range(4):
        begin = time.perf_counter()
        target.copy_(tensor)
        torch().cuda.synchronize()
        middle = time.perf_counter()
        bound.async_set_value(target=target, value=value, stream=stream).wait(30)
        end = time.perf_counter()
        times = {"torch": min(times["torch"], middle - begin), "hal": min(times["hal"], end - middle)}
    share = times["torch"] / times["hal"]
    rates = ", ".join(f"{who} {value.nbytes / seconds / 1e9:.1f}" for who, seconds in times.items())
    return share < 0.6, f"GB/s: {rates}; {share:.2f} of torch's"


def dropped_devices(bound: BoundDevice) -> Found:
    """Unreferenced devices that were not closed, each with 16 MB of page-locked memory."""
    before = pinned(bound)
    for _ in range(8):
        device = bind(CudaPlugin.open(0, {"ring_start": 16 * MB}))
        target = device.state(SIZES).view("temperature")
        device.async_set_value(target=target, value=np.ones(target.shape), stream=device.default_stream).wait(10)
        del device, target
        gc.collect()
    more = (pinned(bound) - before) / MB
    return more > 64, f"{more:.0f} MB more are page-locked after eight devices of 16 MB"


def burst(bound: BoundDevice) -> Found:
    """Page-locked memory of eight copies of 64 MB, after their last reference is gone."""
    before, memory = pinned(bound), bound.device.allocate(64 * MB)
    part, stream = ByteRange(0, 64 * MB), bound.device.stream()
    made = [bound.copy_out(memory=memory, parts=[part], stream=stream) for _ in range(8)]
    for copy in made:
        copy.wait(30)
    most = (pinned(bound) - before) / MB
    del made, copy
    gc.collect()
    bound.copy_out(memory=memory, parts=[ByteRange(0, 64)], stream=stream).wait(10)
    left = (pinned(bound) - before) / MB
    return left > 128, f"{most:.0f} MB during eight copies of 64 MB, {left:.0f} MB after"


CASES: dict[str, Callable[[BoundDevice], Found]] = {
    "lazy and sparse tensors": lazy,
    "a value is dropped after the call": dropped_value,
    "a target is dropped after the call": dropped_target,
    "a full launch queue": full_queue,
    "256 MB on a busy stream": large_value,
    "calls from another thread": threads,
    "a misaligned access": sticky,
    "100,000 copies out": copies,
    "a wait with a time limit": time_out,
    "Ctrl-C in a wait": interrupt,
    "the speed of 256 MB": speed,
    "devices that are dropped": dropped_devices,
    "memory of copies out": burst,
}


@contextmanager
def child(what: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs a function of this file; it ends with the context."""
    command, pipe = [sys.executable, str(Path(__file__).resolve()), f"--{what}"], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main(words: list[str]) -> int:
    """Check for each fault, and print the result."""
    if words in (["--waits"], ["--spoils"]):
        {"--waits": waits, "--spoils": spoils}[words[0]]()
        return 0
    if not (found := CudaPlugin.probe()).available:
        raise SystemExit(f"faults: no GPU: {found.reason}")
    begin, back = time.monotonic(), 0
    print(f"{torch().cuda.get_device_name()}, torch {torch().__version__}, NumPy {np.__version__}", flush=True)
    chosen = {name: case for name, case in CASES.items() if not words or any(word in name for word in words)}
    for name, case in chosen.items():
        try:
            with opened() as bound:
                fault, detail = case(bound)
        except Exception as error:  # noqa: BLE001 (each is a fault and is reported)
            fault, detail = True, f"{type(error).__name__}: {error}"[:160]
        back += fault
        print(f"{name:36s} {'FAULT' if fault else 'ok':6s} {detail}", flush=True)
    print(f"{back} of {len(chosen)} faults are back; {time.monotonic() - begin:.0f} s")
    return int(back > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
