"""What all measurements of a served model share: shapes, a runner on the GPU, busy threads, facts."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hal_core import BoundDevice, OutputRecord, SlotState, StateConfig
from hal_core.runtime.bound import bind
from hal_engine.engine import Engine, Limits
from hal_engine.model.config import parse_config
from hal_engine.stepping import RunnerSetup, Stepper
from hal_torch.model import Decoder
from hal_torch.runner import TorchRunner

from hal import open_device

_LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 8192}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
SHAPES = {
    "8B": _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "1B": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "tiny": _LLAMA
    | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Llama 3 of 8 and of 1 billion parameters; "tiny" is a check without measurement, on any machine."""
BLOCK, LONGEST = 16, 1024
"""Tokens of a block; of a request."""
SHORT_INTERVAL = 1e-4
"""Seconds: the switch interval that docs/busy-threads.md explains."""


class Handed:
    """A sink as of ``hal run`` in one process: an output is complete when the engine has taken its record."""

    session = 1

    def __init__(self, to: Callable[[OutputRecord], None]) -> None:
        self._pending, self._to = deque[Any](), to

    def put(self, pending: Any) -> None:  # noqa: ANN401 (a PendingOutput)
        self._pending.append(pending)

    def take(self, record: OutputRecord) -> None:
        """The engine has taken a record."""
        self._pending.popleft().complete(None)
        self._to(record)

    def close(self, timeout: float) -> None:
        """The step behind the last end is never taken."""
        while self._pending:
            pending = self._pending.popleft()
            pending.resolve()
            pending.complete(None)


@dataclass
class Node:
    """A runner of random weights on a state, for hal's engine and for the plain loop."""

    device: BoundDevice
    state: SlotState
    runner: TorchRunner
    blocks: int
    chunk: int

    @property
    def slots(self) -> int:
        return self.state.sizes.num_slots

    @contextmanager
    def engine(self, to: Callable[[OutputRecord], None], *, overlap: bool) -> Iterator[Engine]:
        """An engine with all slots free, which hands each record on as in ``hal run`` of one process."""
        sink = Handed(to)
        stepper = Stepper(self.device, self.state, self.runner, sink, blocks=self.blocks)
        yield Engine(stepper, Limits(chunk=self.chunk), overlap=overlap, on_record=sink.take)
        sink.close(30.0)


def decoder_of(shape: str) -> Decoder:
    """Random weights, bfloat16 on the GPU."""
    on_gpu = torch.cuda.is_available()
    made = parse_config(SHAPES[shape])
    return Decoder.random(made, "cuda" if on_gpu else "cpu", torch.bfloat16 if on_gpu else torch.float32)


def device_of() -> BoundDevice:
    """Return the GPU, by its plugin alone, which needs no installation. Else the cpu device."""
    if not torch.cuda.is_available():
        return open_device("cpu")
    from hal_cuda import CudaPlugin

    return bind(CudaPlugin.open(0, {}))


@contextmanager
def opened(decoder: Decoder, slots: int, longest: int = LONGEST) -> Iterator[Node]:
    """A state of so many slots with its runner, on a stream of torch's that is not CUDA's default one."""
    with ExitStack() as stack:
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        sizes = StateConfig(slots, longest, BLOCK, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_bad_words=1)
        device = stack.enter_context(device_of())
        blocks = slots * sizes.max_blocks
        setup = RunnerSetup(device, sizes, blocks, Path())
        runner = TorchRunner(setup, decoder=decoder)
        yield Node(device, setup.state, runner, blocks, runner.chunk)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@contextmanager
def busy_threads(threads: int, interval: float | None = None) -> Iterator[None]:
    """With so many threads that compute in Python, and a switch interval. Garbage that is there already is left out of
    collections, which go on."""
    stop, former = threading.Event(), sys.getswitchinterval()

    def compute() -> None:
        while not stop.is_set():
            sum(range(2000))

    running = [threading.Thread(target=compute) for _ in range(threads)]
    gc.collect()
    gc.freeze()
    if interval is not None:
        sys.setswitchinterval(interval)
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()
        sys.setswitchinterval(former)
        gc.unfreeze()
