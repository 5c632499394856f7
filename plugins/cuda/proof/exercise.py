"""Runs every kernel of the cuda device once or a few times, small enough for compute-sanitizer."""

from __future__ import annotations

import numpy as np
from hal_core import Request, SamplingParams, SlotState, StateConfig, Task, TaskBatch, TaskKind, admit
from hal_core.output.sinks import MemorySink
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.slots.step import Step
from hal_cuda import CudaPlugin


def mixed(bound: BoundDevice, state: SlotState) -> None:
    """Requests that were handed over, beside one that is prefilled in pieces, and blocks for running requests."""
    requests = [state.admit(Request(f"m{i}", [6] * 2500)) for i in range(8)]
    tasks = [Task(TaskKind.REMOTE_PREFILL, i, one, 2500, 0, range(157), first_token=4, drafts=(5, 6)[: i % 3])
             for i, one in enumerate(requests[:7])]  # fmt: skip
    tasks.append(Task(TaskKind.PREFILL, 7, requests[7], 0, 1000, range(63)))
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream)
    tasks = [Task(TaskKind.MORE_BLOCKS, i, one, blocks=[i], first_block=157) for i, one in enumerate(requests[:7])]
    tasks.append(Task(TaskKind.PREFILL_CHUNK, 7, requests[7], 1000, 1500, range(94), first_block=63))
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait()
    state.release(range(8))


def main() -> None:
    """Run the hooks on one GPU and check the last record."""
    bound = bind(CudaPlugin.open(0, {}))
    state = bound.state(StateConfig(num_slots=8, max_model_len=5000, block_size=16, max_draft_tokens=2, max_logprobs=2))
    stream = bound.default_stream
    params = SamplingParams(max_tokens=5, stop_sequences=((7, 8),), eos_token_ids=(3,), bad_words=(1, 2))
    record = None
    for turn, length in enumerate((4900, 3)):
        originals = [Request(f"r{turn}-{i}", [5] * length, params) for i in range(8)]
        # The first turn has requests staged by the device, the second unstaged ones, which use the general path.
        requests = [admit(r, state.layout) if turn else state.admit(r) for r in originals]
        blocks = [range(-(-length // 16))] * 8
        batch = TaskBatch.prefill(range(8), requests, [length] * 8, blocks)
        bound.insert_tasks(state=state, tasks=batch, stream=stream)
        bound.async_set_value(target=state.view("sampled_token_ids"), value=np.arange(8), stream=stream)
        bound.async_set_value(target=state.view("topk_logprobs")[::2, ::3], value=-0.5, stream=stream)
        bound.async_set_value(target=state.view("topk_logprobs")[1::2, 1::3], value=np.zeros((4, 3)), stream=stream)
        bound.async_set_value(target=state.view("temperature")[3], value=0.5, stream=stream)
        bound.async_set_value(
            target=state.view("accept_tokens")[0], value=state.view("accept_tokens")[1], stream=stream
        )
        for number in range(2):
            step = Step(2 * turn + number, {"target": np.arange(8)}, speculative=bool(number))
            bound.async_set_value(target=state.view("accept_tokens"), value=9, stream=stream)
            bound.async_set_value(target=state.view("accept_num"), value=2, stream=stream)
            bound.update_inputs(state=state, step=step, stream=stream)
            record = state.take(bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream))
        state.release(range(8))
    mixed(bound, state)
    assert record is not None
    assert record.counts.tolist() == [2, 2, 2, 0, 2, 2, 2, 2], record.counts
    bound.close()
    print("every kernel ran")


if __name__ == "__main__":
    main()
