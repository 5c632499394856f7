"""The kernel of insertions, from its own source: any number of threads a block, rows of any length, uploaded or read in
place. The resulting states equal the cpu device's."""

import numpy as np
import pytest
from hal_core import Request, SamplingParams, StateConfig, Task, TaskKind
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind
from hal_cuda import insertion
from hal_cuda.structs import ENTRY, FEW_BYTES

from .states import contents

HELD = 8 << 10
SHORT = StateConfig(num_slots=6, max_model_len=5000, block_size=8, max_draft_tokens=3, max_stop_length=5)
LONG = StateConfig(num_slots=6, max_model_len=5001, block_size=8, max_draft_tokens=3, max_stop_length=300)


def batches(length, turn):
    """Hand-offs with drafts beside requests that are prefilled in pieces, then blocks and pieces for all of them."""
    count, half = -(-(length + 1) // 8), length // 2
    blocks = range(turn, turn + count)
    first = [
        (TaskKind.REMOTE_PREFILL, slot, length, 0, blocks, 0, {"first_token": slot + 7, "drafts": range(slot % 4)})
        if slot % 2
        else (TaskKind.PREFILL, slot, 0, half, blocks, 0, {})
        for slot in range(6)
    ]
    second = [
        (TaskKind.MORE_BLOCKS, slot, 0, 0, [900 + slot, 901], count, {})
        if slot % 2
        else (TaskKind.PREFILL_CHUNK, slot, half, length - half, [slot], count, {})
        for slot in range(6)
    ]
    return first, second


@pytest.mark.parametrize("few", [0, FEW_BYTES], ids=["", "entries with the launch"])
@pytest.mark.parametrize("near", [0, 1 << 20], ids=["uploaded", "read in place"])
@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("sizes", [SHORT, LONG], ids=["short rows", "rows longer than shared memory"])
def test_g09_g11_blocks_of_any_size_leave_what_the_cpu_device_leaves(opened, monkeypatch, near, few, threads, sizes):
    monkeypatch.setattr(insertion, "NEAR", near)
    monkeypatch.setattr(insertion, "FEW", few)
    pair = opened(), bind(CpuPlugin.open(0, {}))
    states = [bound.state(sizes) for bound in pair]
    library = pair[0].device.driver.api.library
    for turn, length in enumerate(
        (4401, 41)
    ):  # odd, as are LONG's rows; the second turn's rows are shorter than those in the state
        stops = tuple((9,) * (sizes.max_stop_length - i) for i in range(4 - 3 * turn))
        params = SamplingParams(
            max_tokens=9, stop_sequences=stops, bad_words=tuple(range(5 - 2 * turn)), eos_token_ids=(3, 4)
        )
        assert turn or (sizes is LONG) == (4 * sizes.max_stop_length * 8 > HELD)
        requests = [states[0].admit(Request(f"{turn}-{i}", range(i, i + length), params)) for i in range(6)]
        first, second = batches(length, turn)
        for tasks in (first, second):
            library.stand_in_threads(threads)
            pair[0].device.driver.api.calls.clear()
            given = [
                Task(kind, slot, requests[slot], start, count, blocks, first_block, **more)
                for kind, slot, start, count, blocks, first_block, more in tasks
            ]
            for bound, state in zip(pair, states, strict=True):
                bound.insert_tasks(state=state, tasks=given, stream=bound.default_stream).wait(30)
            library.stand_in_threads(1)
            done = [call for call in pair[0].device.driver.api.calls if not call.startswith("stream")]
            ids = sum([len(blocks) + len(more.get("drafts", ())) for *_, blocks, _, more in tasks])
            in_place = near or tasks is second  # only its entries are new
            if in_place and 6 * ENTRY.size + 4 * ids <= few:
                assert done == ["hal_enter_few"]
            else:
                assert done == ["copy"] * (not near) + ["hal_enter"]
            mine, theirs = (contents(bound, state) for bound, state in zip(pair, states, strict=True))
            for name, column in theirs.items():
                np.testing.assert_array_equal(mine[name], column, err_msg=name)
        for state in states:
            state.release(range(6))
