"""What recording costs a worker of 128 slots: processor time of its thread, and bytes, a step. On cpu, without a model.

python benchmarks/recording.py [--drafts N] [--steps N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from hal_conformance.harness.sinks import KeepingSink
from hal_conformance.replay.recorder import CallRecorder
from hal_core import Request, SamplingParams, StateConfig, Step, Task, TaskKind, bind
from hal_core.devices.cpu.device import CpuDevice

SLOTS, PROMPT, LONGEST = 128, 20, 2048


def run(steps: int, drafts: int, path: Path | None) -> Iterator[float]:
    """Yield the seconds of processor time of each step of a worker, recorded into ``path`` or not."""
    with bind(CpuDevice(0, {})) as bound, nullcontext() if path is None else closing(CallRecorder(path, bound)):
        sizes = StateConfig(num_slots=SLOTS, max_model_len=LONGEST, max_draft_tokens=drafts)
        state, stream, draw = bound.state(sizes), bound.default_stream, np.random.default_rng(0)
        prompt, params = [*range(5, 5 + PROMPT)], SamplingParams(max_tokens=LONGEST - PROMPT)
        requests = [state.admit(Request(f"request-{slot}", prompt, params)) for slot in range(SLOTS)]
        tasks = [
            Task(TaskKind.PREFILL, slot, request, num_scheduled_tokens=PROMPT, blocks=[2 * slot, 2 * slot + 1])
            for slot, request in enumerate(requests)
        ]
        bound.insert_tasks(state=state, tasks=tasks, stream=stream)
        call: dict[str, Any] = {"state": state, "stream": stream}
        for number in range(steps):
            counts = draw.integers(1, sizes.max_accept + 1, (SLOTS, 1), np.int32)
            tokens = np.where(np.arange(sizes.max_accept) < counts, draw.integers(0, 30_000, (SLOTS, drafts + 1)), -1)
            own = draw.integers(0, 30_000, (SLOTS, drafts)).tolist()
            more = [
                Task(TaskKind.MORE_BLOCKS, slot, request, blocks=[number + slot], first_block=2 + number // 16)
                for slot, request in enumerate(requests)
            ]
            began = time.thread_time()
            bound.order_after_reads(memory=state.memory, stream=stream)
            if number % 16 == 0:
                bound.insert_tasks(tasks=more, **call)
            if drafts:
                bound.async_set_value(target=state.view("accept_tokens"), value=tokens, stream=stream)
                bound.async_set_value(target=state.view("accept_num"), value=counts, stream=stream)
            else:
                bound.async_set_value(target=state.view("sampled_token_ids"), value=tokens, stream=stream)
            step, sink = Step(number, {"target": range(SLOTS)}, speculative=drafts > 0), KeepingSink()
            bound.update_inputs(step=step, **call)
            if drafts:
                bound.set_drafts(step=step, drafts={slot: own[slot] for slot in range(SLOTS)}, **call)
            state.take(bound.save_output(step=step, sink=sink, **call))
            sink.resolve_all()
            yield time.thread_time() - began


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.rec")
        both = [run(given.steps, given.drafts, target) for target in (None, path)]  # in turn, step by step
        without, recorded = 1e6 * np.array([*zip(*both, strict=True)]).T
        size = path.stat().st_size / given.steps
    for name, of in (("mean", np.mean), ("median", np.median)):
        print(f"{name} us a step: {of(without):.0f} without, {of(recorded - without):.0f} more recorded")
    print(f"{size:.0f} bytes a step, {size / 100:.1f} MB for 10,000 steps")


if __name__ == "__main__":
    main()
