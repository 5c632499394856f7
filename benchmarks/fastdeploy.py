"""Twenty declared fields beside none, and FastDeploy's insertion beside hal's own: 128 prefills of 1,024 tokens on cpu.

    python benchmarks/fastdeploy.py

Each round takes the ways in turn. hal's admission is counted where it is named, as FastDeploy's insertion converts and
checks the requests too.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from hal_core import BoundDevice, Request, SamplingParams, SlotState, StateConfig, StateField, TaskBatch
from hal_fastdeploy import Insertion

import hal

REQUESTS, TOKENS, ROUNDS = 128, 1024, 30
SIZES = StateConfig(num_slots=REQUESTS, max_model_len=4096)
BLOCKS = [list(range(TOKENS // 16))] * REQUESTS
FIELDS = [
    StateField(f"field_{at}", "float32" if at % 2 else "int32", 1 if at < 15 else 4, 0, "step_input", "extra")
    for at in range(20)
]
EXTRA = {field.name: 1 if field.width == 1 else [1, 2] for field in FIELDS}
PROMPTS = [np.random.default_rng(at).integers(0, 30_000, TOKENS).tolist() for at in range(REQUESTS)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=100)


def upstream() -> Any:  # noqa: ANN401 (a module of the tests)
    """The stand-ins for FastDeploy's classes, of a production's sizes."""
    file = Path(__file__).parent.parent / "plugins/fastdeploy/tests/upstream.py"
    spec = importlib.util.spec_from_file_location("upstream", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["upstream"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SIZES.update(n=REQUESTS, L=4096, C=4096, V=32_000, Q=8, q=16, B=256, E=1)
    return module


def admitted(state: SlotState, extra: dict[str, Any]) -> list[Any]:
    """The requests, packed."""
    return [state.admit(Request(f"r{at}", prompt, PARAMS, extra=extra)) for at, prompt in enumerate(PROMPTS)]


def insert(device: BoundDevice, state: SlotState, requests: list[Any]) -> None:
    """One insertion of all."""
    tasks = TaskBatch.prefill(range(REQUESTS), requests, [TOKENS] * REQUESTS, BLOCKS)
    device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream).wait()


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = perf_counter()
    work()
    return (perf_counter() - begin) * 1e3


def main() -> None:
    """Measure, and print medians and ratios."""
    up = upstream()
    with hal.open_device("cpu") as device:
        plain, more = device.state(SIZES), device.state(SIZES, name="more", fields=FIELDS)
        runner = up.runner_of(up.arrays(up.TARGET))
        insertion = Insertion(device, runner, upstream=print)
        values = {"temperature": 1.0, "max_tokens": 100}
        asked = [
            up.Request(
                up.PREFILL, at, f"r{at}", prompt_token_ids=prompt, output_token_ids=[], prefill_start_index=0,
                prefill_end_index=TOKENS, block_tables=BLOCKS[at], eos_token_ids=[2], values=values,
            )
            for at, prompt in enumerate(PROMPTS)
        ]  # fmt: skip
        taken: dict[str, list[float]] = {
            "insert": [],
            "insert, 20 fields": [],
            "admit and insert": [],
            "FastDeploy": [],
        }
        for turn in range(ROUNDS):
            for state in (plain, more):
                state.release(range(REQUESTS))
            ways = [("insert", plain, admitted(plain, {})), ("insert, 20 fields", more, admitted(more, EXTRA))]
            for name, state, requests in ways[:: 1 if turn % 2 else -1]:
                begin = perf_counter()
                insert(device, state, requests)
                taken[name].append((perf_counter() - begin) * 1e3)
            plain.release(range(REQUESTS))
            taken["admit and insert"].append(timed(lambda: insert(device, plain, admitted(plain, {}))))
            taken["FastDeploy"].append(timed(lambda: insertion(asked, REQUESTS).wait()))
    found = {name: median(times) for name, times in taken.items()}
    for name, base in (("insert, 20 fields", "insert"), ("FastDeploy", "admit and insert")):
        print(f"{name}: {found[name]:.2f} ms, {base}: {found[base]:.2f} ms, ratio {found[name] / found[base]:.2f}")


if __name__ == "__main__":
    main()
