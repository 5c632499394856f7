"""The worker's own work per step, model and sampling left out, at 32 running slots.

    python benchmarks/worker_step.py

Prints the median of a decoding step and where it goes. The engine's share is shown apart: it is not the worker's.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
from hal_core.devices.cpu import CpuPlugin
from hal_core.output.sinks import PendingOutput
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig

import hal.worker.runner
import hal.worker.tokens
from hal.engine import Engine
from hal.model.batch import ModelBatch
from hal.worker import Worker

P, R = ParamSpec("P"), TypeVar("R")
SLOTS, MAX_TOKENS, PROMPT, STEPS, TARGET_MS = 32, 1024, 64, 600, 1.0


@dataclass(frozen=True)
class Config:
    """As much of a model's configuration as a worker needs."""

    vocab_size: int = 512


class NoModel:
    """Gives the same logits whatever it is asked."""

    config = Config()

    def __init__(self) -> None:
        self._logits = np.random.default_rng(0).standard_normal((SLOTS, self.config.vocab_size)).astype(np.float32)

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Nothing is cached."""

    def forward(self, batch: ModelBatch) -> np.ndarray:
        """float32 ``[rows, vocab]``."""
        return self._logits[: len(batch.row_lengths)]


class Stopwatch:
    """Seconds by name, of the calls that go through :meth:`timed`."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[P, R]) -> Callable[P, R]:
        """``call``, with its time added to ``name``."""

        def timed_call(*args: P.args, **kwargs: P.kwargs) -> R:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[name] += time.perf_counter() - begin

        return timed_call


def measure(engine: Engine, watch: Stopwatch) -> tuple[list[float], dict[str, list[float]]]:
    """Milliseconds of each decoding step's own work, and of its parts."""
    totals, parts = [], defaultdict(list)
    while engine.busy:
        watch.spent.clear()
        engine.step()
        spent = {name: seconds * 1e3 for name, seconds in watch.spent.items()}
        spent["worker.step"] -= spent.pop("model") + spent["sampling"]
        spent["sampling rows"] -= spent.pop("sampling")
        totals.append(spent["worker.step"])
        for name, milliseconds in spent.items():
            parts[name].append(milliseconds)
    return totals, parts


def instrument(engine: Engine, watch: Stopwatch) -> None:
    """Time the parts of a step by wrapping them."""
    worker, scheduler = engine.worker, engine.scheduler
    assert isinstance(worker, Worker)
    hooks = ("insert_tasks", "async_set_value", "broadcast_tokens", "update_inputs", "save_output")
    parts: list[tuple[object, str, str]] = [(worker.device, hook, hook) for hook in hooks]
    parts += [
        (worker.model, "forward", "model"),
        (hal.worker.runner, "read_inputs", "copy_out and model batch"),
        (hal.worker.runner, "choose_tokens", "sampling rows"),
        (hal.worker.tokens, "sample", "sampling"),
        (worker.state, "take", "record (state.take)"),
        (worker, "launch", "worker.step"),
        (worker, "take", "worker.step"),
        (scheduler, "schedule", "engine: schedule"),
        (scheduler, "update", "engine: update"),
    ]
    for owner, name, label in parts:
        setattr(owner, name, watch.timed(label, getattr(owner, name)))


class Unread:
    """A sink that drops outputs without resolving them: the time of the step alone."""

    session = 1

    def put(self, pending: PendingOutput) -> None:
        pending.complete(None)

    def close(self, timeout: float) -> None:
        """Nothing to drain."""


def main() -> None:
    """Run ``STEPS`` steps of 32 requests and print the table."""
    sizes = StateConfig(num_slots=SLOTS, max_model_len=MAX_TOKENS)
    with bind(CpuPlugin.open(0, {})) as device:
        engine = Engine(Worker(device, NoModel(), sizes, SLOTS * sizes.max_blocks, Unread()), chunk=1 << 20)
        params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=STEPS)
        for number in range(SLOTS):
            engine.submit(Request(f"r{number}", list(range(number, number + PROMPT)), params))
        watch = Stopwatch()
        instrument(engine, watch)
        totals, parts = measure(engine, watch)
    decode = slice(20, -2)
    median = statistics.median(totals[decode])
    print(f"{'one decoding step, 32 running slots':40}{median:8.3f} ms   (at most {TARGET_MS} ms)")
    engines = [name for name in parts if name.startswith("engine")]
    inside = {name: statistics.median(parts[name][decode]) for name in parts if name not in (*engines, "worker.step")}
    for name, milliseconds in inside.items():
        print(f"  {name:38}{milliseconds:8.3f}")
    print(f"  {'the rest':38}{median - sum(inside.values()):8.3f}")
    for name in engines:
        print(f"{name:40}{statistics.median(parts[name][decode]):8.3f}")


if __name__ == "__main__":
    main()
