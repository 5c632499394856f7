"""Twenty declared fields beside none, and FastDeploy's insertion beside hal's own: 128 prefills of 1,024 tokens on cpu.

    python benchmarks/fastdeploy.py

Each round runs every way in turn. FastDeploy's insertion starts from requests: it converts and checks their tokens and
parameters. hal does this at admission, so the fair comparison is with admission and insertion together. Prompts are
lists of Python integers or, where named, arrays. Processor time of the process, which other processes do not change.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
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
ARRAYS = [np.random.default_rng(at).integers(0, 30_000, TOKENS) for at in range(REQUESTS)]
PROMPTS = [prompt.tolist() for prompt in ARRAYS]
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


def admitted(state: SlotState, extra: dict[str, Any], prompts: list[Any] = PROMPTS) -> list[Any]:
    """The requests, packed."""
    return [state.admit(Request(f"r{at}", prompt, PARAMS, extra=extra)) for at, prompt in enumerate(prompts)]


def insert(device: BoundDevice, state: SlotState, requests: list[Any]) -> None:
    """One insertion of all."""
    tasks = TaskBatch.prefill(range(REQUESTS), requests, [TOKENS] * REQUESTS, BLOCKS)
    device.insert_tasks(state=state, tasks=tasks, stream=device.default_stream).wait()


def asked(up: Any, prompts: list[Any]) -> list[Any]:  # noqa: ANN401 (a module of the tests)
    """The same as FastDeploy's requests."""
    values = {"temperature": 1.0, "max_tokens": 100}
    return [
        up.Request(
            up.PREFILL, at, f"r{at}", prompt_token_ids=prompt, output_token_ids=[], prefill_start_index=0,
            prefill_end_index=TOKENS, block_tables=BLOCKS[at], eos_token_ids=[2], values=values,
        )
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip


def main() -> None:
    """Measure, and print medians and ratios."""
    up = upstream()
    with hal.open_device("cpu") as device:
        plain, more = device.state(SIZES), device.state(SIZES, name="more", fields=FIELDS)
        insertion = Insertion(device, up.runner_of(up.target_arrays()), upstream=print)
        ready: list[Any] = []
        lists, arrays = asked(up, PROMPTS), asked(up, ARRAYS)
        ways: dict[str, tuple[Callable[[], list[Any]], Callable[[], object]]] = {
            # uncounted preparation; counted work
            "insert": (lambda: admitted(plain, {}), lambda: insert(device, plain, ready)),
            "insert, 20 fields": (lambda: admitted(more, EXTRA), lambda: insert(device, more, ready)),
            "admit and insert": (list, lambda: insert(device, plain, admitted(plain, {}))),
            "admit and insert, arrays": (list, lambda: insert(device, plain, admitted(plain, {}, ARRAYS))),
            "FastDeploy": (list, lambda: insertion(lists, REQUESTS).wait()),
            "FastDeploy, arrays": (list, lambda: insertion(arrays, REQUESTS).wait()),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS):
            for name, (prepare, work) in [*ways.items()][:: 1 if turn % 2 else -1]:
                for state in (plain, more):
                    state.release(range(REQUESTS))
                ready[:] = prepare()
                begin = process_time()
                work()
                taken[name].append((process_time() - begin) * 1e3)
    found = {name: median(times) for name, times in taken.items()}
    for name, base in (
        ("insert, 20 fields", "insert"),
        ("FastDeploy", "admit and insert"),
        ("FastDeploy", "insert"),
        ("FastDeploy, arrays", "admit and insert, arrays"),
        ("FastDeploy, arrays", "insert"),
    ):
        print(f"{name}: {found[name]:.2f} ms, {base}: {found[base]:.2f} ms, ratio {found[name] / found[base]:.2f}")


if __name__ == "__main__":
    main()
