"""Setup of all measurements: an opened GPU with a state, a kernel that stands in for decoding, and requests."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.slots.admission import AdmittedRequest, Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.state import SlotState

SLOTS, MAX_TOKENS = 128, 9216
SIZES = StateConfig(num_slots=SLOTS, max_model_len=MAX_TOKENS)
PARAMS = SamplingParams(
    max_tokens=1000, temperature=0.5, eos_token_ids=(2,), stop_sequences=((5, 6), (7,)), bad_words=(9, 10)
)
"""Every row field has something to write: stop sequences and their lengths, bad words, blocks, tokens."""

STAND_IN = r"""
typedef unsigned long long u64;
struct Params { u64 ns, times, tokens; unsigned slots, step; };
__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
extern "C" __global__ void stand_in(__grid_constant__ const Params p) {
  u64 begin = now();
  if (threadIdx.x == 0) while (now() - begin < p.ns) __nanosleep(200);
  __syncthreads();
  if (p.tokens)
    for (unsigned i = threadIdx.x; i < p.slots; i += blockDim.x) ((long long*)p.tokens)[i] = 1000 + (p.step + i) % 500;
  __syncthreads();
  if (threadIdx.x == 0 && p.times) { ((u64*)p.times)[0] = begin; ((u64*)p.times)[1] = now(); }
}
"""


class StandIn:
    """Keeps a stream busy for a time, notes when (GPU clock, ns), and writes a token for each slot."""

    def __init__(self, device: BoundDevice) -> None:
        from hal_cuda.compiling import compile_source
        from hal_cuda.launching import Kernel
        from hal_cuda.structs import struct

        params = struct(("ns", "<u8"), ("times", "<u8"), ("tokens", "<u8"), ("slots", "<u4"), ("step", "<u4"))
        driver = device.device.driver
        code = compile_source(STAND_IN, device.device.context.arch)
        module = driver.ok(driver.api.cuModuleLoadData(code), "cuModuleLoadData")
        self._kernel = Kernel(driver, module, "stand_in", params)

    def launch(self, ms: float, stream: int, *, times: int = 0, tokens: int = 0, step: int = 0) -> None:
        """Put it on a stream; ``times`` and ``tokens`` are device addresses."""
        params = self._kernel.params
        params["ns"], params["times"], params["tokens"] = int(ms * 1e6), times, tokens
        params["slots"], params["step"] = SLOTS, step
        self._kernel.launch(1, 128, stream)


@dataclass(frozen=True)
class Rig:
    """One GPU, opened; a state of 128 slots; torch's current stream, which is hal's too."""

    index: int
    device: BoundDevice
    state: SlotState
    stream: Any
    stand_in: StandIn

    @classmethod
    def open(cls, index: int = 0) -> Rig:
        """Open GPU ``index`` on a stream of torch's that is not CUDA's default stream."""
        import torch
        from hal_cuda import CudaPlugin

        torch.cuda.set_device(index)
        torch.cuda.set_stream(torch.cuda.Stream(index))
        device = bind(CudaPlugin.open(index, {}))
        return cls(index, device, device.state(SIZES), device.default_stream, StandIn(device))

    def dump(self) -> dict[str, np.ndarray[Any, Any]]:
        """All fields of the state, copied out."""
        whole = ByteRange(0, self.state.layout.nbytes)
        ticket = self.device.device.copy_out(self.state.memory, [whole], self.stream)
        ticket.wait()
        return {name: column.copy() for name, column in self.state.columns(ticket.data[0], whole).items()}

    def admit(self, count: int, tokens: int) -> list[AdmittedRequest]:
        """Requests of random prompts, admitted now."""
        prompts = np.random.default_rng(count * 100_003 + tokens).integers(10, 30_000, (count, tokens))
        return [self.state.admit(Request(f"r{i}", prompts[i], PARAMS)) for i in range(count)]


def blocks_of(count: int, tokens: int) -> list[np.ndarray[Any, Any]]:
    """KV block ids for each of ``count`` requests."""
    each = -(-tokens // SIZES.block_size)
    return [np.arange(each, dtype=np.int32) + i * each for i in range(count)]


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Busy:
    """A thread that computes in Python while it is switched on, as a worker's other threads do. A context manager."""

    def __init__(self, *, used: bool) -> None:
        """``used``: False for one that is never on."""
        self._used, self._on, self._over = used, threading.Event(), False
        self._thread = threading.Thread(target=self._compute, daemon=True)

    def _compute(self) -> None:
        while self._on.wait() and not self._over:
            sum(range(2000))

    def on(self) -> None:
        """From here on it wants the interpreter. It has had it when this returns, and the caller's core is awake."""
        if self._used:
            self._on.set()
            time.sleep(1e-3)
            awake = time.perf_counter() + 3e-4
            while time.perf_counter() < awake:
                pass

    def off(self) -> None:
        """It waits."""
        self._on.clear()

    def __enter__(self) -> Busy:
        if self._used:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._on.set()
        if self._used:
            self._thread.join()


def median(values: Sequence[float]) -> float:
    """The median, to three digits after the point."""
    return round(float(np.median(values)), 3)


def spread(values: Sequence[float]) -> list[float]:
    """The 10th and 90th percentile."""
    return [round(float(v), 3) for v in np.percentile(values, [10, 90])]
