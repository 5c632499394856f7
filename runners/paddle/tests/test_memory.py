"""The worker's memory does not grow, however many steps it takes."""

from __future__ import annotations

import gc
import os
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_engine.engine import Engine, Limits
from hal_paddle_runner.worker import Worker


class Nonsense:
    """A model with constant logits."""

    config = SimpleNamespace(vocab_size=16)

    def allocate_cache(self, blocks, block_size):
        pass

    def forward(self, batch):
        rows = batch.row_lengths if batch.outputs is None else batch.outputs
        return np.tile(np.arange(16, dtype=np.float32), (len(rows), 1))


def resident() -> int:
    """Bytes of memory that the process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(engine: Engine, steps: int, names: count) -> None:
    """So many steps with requests coming and going, some with penalties or log-probabilities, some aborted."""
    for _ in range(steps):
        while len(engine.scheduler.waiting) < 2:
            number = next(names)
            params = SamplingParams(
                max_tokens=20 + number % 13,
                logprobs=1 if number % 11 == 0 else None,
                frequency_penalty=0.1 * (number % 7 == 0),
            )
            engine.submit(Request(f"r{number}", [1] * (1 + number % 9), params))
            if number % 5 == 4:
                engine.abort(f"r{number - 4}")
        engine.step()


class Unread:
    """A sink that drops outputs without resolving them."""

    session = 1

    def put(self, pending):
        pending.complete(None)

    def close(self, timeout):
        """No queue to drain."""


@pytest.mark.conform
def test_memory_does_not_grow_over_10_000_steps():
    names = count()
    with bind(CpuPlugin.open(0, {})) as device:
        worker = Worker(
            device, Nonsense(), StateConfig(num_slots=3, max_model_len=64, block_size=4, max_logprobs=2), 20, Unread()
        )
        engine = Engine(worker, Limits(chunk=8))
        run(engine, 1000, names)  # caches fill
        gc.collect()
        objects, memory = sys.getallocatedblocks(), resident()
        run(engine, 10_000, names)
        gc.collect()
        grown = sys.getallocatedblocks() - objects
        assert engine.scheduler.preemptions > 0, "the steps should have met preemptions"
        assert grown < 500, f"{grown} more objects after 10,000 steps"
        assert resident() - memory < 2 << 20
