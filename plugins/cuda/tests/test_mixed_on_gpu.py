"""On a GPU: requests that enter, are handed over, continue or grow in one batch, compared with the cpu device."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core import Request, StateConfig, Task, TaskKind
from hal_core.devices.cpu import CpuPlugin
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import bind
from hal_cuda import CudaPlugin

found = CudaPlugin.probe()
pytestmark = pytest.mark.skipif(not found.available, reason=f"no GPU: {found.reason}")
SIZES = StateConfig(num_slots=12, max_model_len=700, block_size=4, max_draft_tokens=3)


@pytest.fixture(scope="module")
def pair():
    """Open a cuda and a cpu device."""
    devices = bind(CudaPlugin.open(0, {})), bind(CpuPlugin.open(0, {}))
    yield devices
    for device in devices:
        device.close()


def contents(bound, state):
    whole = ByteRange(0, state.layout.nbytes)
    copied = bound.device.copy_out(state.memory, [whole], bound.default_stream)
    copied.wait(10)
    return state.columns(copied.data[0], whole)


@pytest.mark.parametrize("length", [40, 600], ids=["read in place", "uploaded"])
def test_g12_hand_offs_and_growth_beside_new_requests_match_the_cpu(pair, length):
    """All kinds of tasks except leaving ones, beside each other; on the native path one launch each time."""
    states, slots = [bound.state(SIZES) for bound in pair], range(SIZES.num_slots)
    requests = [states[0].admit(Request(f"{length}-{i}", range(i, i + length))) for i in slots]
    half, whole = length // 2, -(-length // 4)
    kinds = TaskKind.PREFILL, TaskKind.REMOTE_PREFILL, TaskKind.PREFILL_CHUNK, TaskKind.MORE_BLOCKS
    first = [
        Task(kinds[1], i, one, length, 0, range(i, i + whole), first_token=i + 7, drafts=range(i % 4))
        if i % 2
        else Task(kinds[0], i, one, 0, half, range(i, i + whole))
        for i, one in enumerate(requests)
    ]
    second = [
        Task(kinds[3], i, one, blocks=[900 + i, 901 + i], first_block=whole)
        if i % 2
        else Task(kinds[2], i, one, half, length - half, [i], first_block=whole)
        for i, one in enumerate(requests)
    ]
    for tasks in (first, second):
        before = pair[0].counters()
        for bound, state in zip(pair, states, strict=True):
            bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream)
        assert (pair[0].counters() - before).launches == 1
        mine, theirs = (contents(bound, state) for bound, state in zip(pair, states, strict=True))
        for name, column in theirs.items():
            np.testing.assert_array_equal(mine[name], column, err_msg=name)
