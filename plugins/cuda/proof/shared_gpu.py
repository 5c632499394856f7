"""Counts wrong states when four processes on one GPU make states in Paddle's memory and insert into them.

    python plugins/cuda/proof/shared_gpu.py

First without the wait for CUDA's default stream that a new block of Paddle's memory needs, then with it. Each process
prints three counts of wrong states: of 400 small ones, of 60 beside a busy copy engine, of 60 large ones beside it.
With the wait all must be 0; then the status is 0.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from hal_core import BoundDevice, ByteRange, Request, SamplingParams, SlotState, StateConfig, Task, TaskKind, admit

PROCESSES, BUSY_BYTES, WAITS = 4, 1 << 28, "HAL_PROOF_WAITS"
CASES = ((3, 32, False, 400), (3, 32, True, 60), (128, 4096, True, 60))
"""Slots, longest request, whether copies keep the GPU busy, states."""


def filled(bound: BoundDevice, sizes: StateConfig) -> SlotState:
    """Return a state with a request in every slot."""
    state, params = bound.state(sizes), SamplingParams(max_tokens=9)
    requests = [admit(Request(f"r{slot}", [1, 2], params), state.layout) for slot in range(sizes.num_slots)]
    tasks = [Task(TaskKind.PREFILL, slot, request, 0, 2, [slot]) for slot, request in enumerate(requests)]
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait(10)
    return state


def fields(bound: BoundDevice, state: SlotState) -> dict[str, np.ndarray]:
    """Return a state's fields, except the numbers of its staged_requests."""
    whole = ByteRange(0, state.layout.nbytes)
    copied = bound.copy_out(memory=state.memory, parts=[whole], stream=bound.default_stream)
    copied.wait(10)
    return {name: found for name, found in state.columns(copied.data[0], whole).items() if name != "request_serial"}


def work() -> list[int]:
    """Run one process: print its counts of wrong states."""
    import paddle
    from hal_core.devices.cpu import CpuPlugin
    from hal_core.runtime.bound import bind
    from hal_cuda import CudaPlugin
    from hal_cuda.device import CudaDevice
    from hal_cuda.primitives import CudaPrimitives

    paddle.set_device("gpu:0")
    if os.environ[WAITS] == "0":
        CudaPrimitives.wait_for_default_stream = lambda primitives: None  # type: ignore[method-assign]
    opened = CudaPlugin.open(0, {})
    assert isinstance(opened, CudaDevice)
    gpu, cpu, api = bind(opened), bind(CpuPlugin.open(0, {})), opened.driver.api
    source, target, side = (
        int(api.cuMemHostAlloc(BUSY_BYTES, 0)[1]),
        int(api.cuMemAlloc(BUSY_BYTES)[1]),
        gpu.device.stream(),
    )
    wrong = []
    for slots, length, busy, states in CASES:
        sizes = StateConfig(num_slots=slots, max_model_len=length, max_logprobs=2)
        should, bad = fields(cpu, filled(cpu, sizes)), 0
        for _ in range(states):
            for _ in range(3 if busy else 0):
                api.cuMemcpyHtoDAsync(target, source, BUSY_BYTES, side.handle)
            state = filled(gpu, sizes)
            side.synchronize(60)
            found = fields(gpu, state)
            bad += any(not np.array_equal(found[name], column) for name, column in should.items())
        wrong.append(bad)
    return wrong


def main() -> int:
    """Start the processes, twice."""
    last = ""
    for waits in "01":
        command, environment = [sys.executable, __file__, "work"], os.environ | {WAITS: waits}
        started = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)
        ]
        last = ", ".join([process.communicate(timeout=120)[0].strip() or "failed" for process in started])
        print(f"{'with' if waits == '1' else 'without'} the wait: {last}", flush=True)
    return 0 if last == ", ".join([str([0] * len(CASES))] * PROCESSES) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        print(work())
    else:
        sys.exit(main())
