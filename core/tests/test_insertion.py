"""Insertion into the cpu device: a batch of any size has the effect of its tasks one by one."""

import numpy as np
import pytest
from hal_core import Request, SamplingParams, StateConfig, Task, TaskBatch, TaskKind, admit
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import bind

SIZES = StateConfig(
    num_slots=24, max_model_len=40, block_size=4, max_bad_words=4, max_stop_sequences=3, max_stop_length=4
)


@pytest.fixture(scope="module")
def device():
    bound = bind(CpuPlugin.open(0, {}))
    yield bound
    bound.close()


@pytest.mark.parametrize("n", [1, 9, SIZES.num_slots])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_scheduled_tokens": 99}, "tokens 0 to 99"),
        ({"num_computed_tokens": -1}, "tokens -1"),
        ({"blocks": []}, "blocks, but the task has 0"),
        ({"blocks": [-7]}, "block -7 is negative"),
        ({"blocks": [1] * 11}, "the table holds 10"),
        ({"slots": 24}, "slots go from 0 to 23"),
    ],
)
def test_g08_one_bad_task_is_found_however_many_there_are(device, n, change, complaint):
    state = device.state(SIZES)
    columns = {
        "slots": list(range(n)),
        "requests": [admit(Request(f"r{i}", [1, 2, 3]), state.layout) for i in range(n)],
        "num_scheduled_tokens": [3] * n,
        "num_computed_tokens": [0] * n,
        "blocks": [[i] for i in range(n)],
    }
    before = state.memory.buffer.copy()
    for name, value in change.items():
        columns[name][n - 1] = value
    with pytest.raises(InvalidBatch, match=complaint):
        device.insert_tasks(state=state, tasks=TaskBatch.prefill(**columns), stream=device.default_stream)
    np.testing.assert_array_equal(state.memory.buffer, before)
    assert not state.host_table.live


@pytest.mark.parametrize("bad", [[1.5], [True], ["1"], [2**31], [None]])
def test_columns_take_whole_numbers_alone(device, bad):
    request = admit(Request("r", [1, 2]), device.state(SIZES).layout)
    with pytest.raises(InvalidValue, match="slots must be whole numbers"):
        TaskBatch.prefill(bad, [request], [2], [[0]])


@pytest.mark.parametrize("n", [3, 12])
def test_g08_a_start_that_overflows_with_its_length_is_refused(device, n):
    state = device.state(SIZES)
    requests = [state.admit(Request(f"r{i}", [1, 2])) for i in range(n)]
    batch = TaskBatch.prefill(range(n), requests, [1] * n, [[i] for i in range(n)], [2**31 - 1, *[0] * (n - 1)])
    with pytest.raises(InvalidBatch, match="tokens 2147483647 to 2147483648 of 2"):
        device.insert_tasks(state=state, tasks=batch, stream=device.default_stream)
    assert not state.host_table.table.any()


@pytest.mark.parametrize("n", [3, 12])
def test_block_ids_that_are_not_contiguous_are_taken(device, n):
    state = device.state(SIZES)
    requests = [state.admit(Request(f"r{i}", [1, 2])) for i in range(n)]
    ids = [np.arange(4, dtype=np.int32)[::2] + i for i in range(n - 1)] + [np.arange(4, dtype=np.int32)[::2]]
    batch = TaskBatch.prefill(range(n), requests, [2] * n, ids)
    device.insert_tasks(state=state, tasks=batch, stream=device.default_stream)
    assert state.host_table.blocks[:n].tolist() == [2] * n


def test_a_part_of_a_state_that_holds_no_whole_field_has_no_columns(device):
    state = device.state(SIZES)
    assert state.columns(np.zeros(8, np.uint8), ByteRange(1, 8)) == {}


@pytest.mark.parametrize(
    ("length", "most"), [(SIZES.max_model_len - 1, 9), (3, 1)], ids=["by the row's length", "by max_tokens"]
)
def test_g12_a_hand_off_that_has_ended_with_its_first_token_is_refused(device, length, most):
    state = device.state(SIZES)
    blocks = range(-(-(length + 1) // SIZES.block_size))
    request = state.admit(Request("r", [1] * length, SamplingParams(max_tokens=most)))
    task = Task(TaskKind.REMOTE_PREFILL, 0, request, length, 0, blocks, first_token=5)
    with pytest.raises(InvalidBatch, match="has ended with its first token"):
        device.insert_tasks(state=state, tasks=[task], stream=device.default_stream)
    assert not state.host_table.live


def test_g08_blocks_for_a_request_that_only_has_the_name_are_refused(device):
    state = device.state(SIZES)
    first, again = (state.admit(Request("r", [1, 2, 3])) for _ in range(2))
    enter = Task(TaskKind.PREFILL, 0, first, num_scheduled_tokens=3, blocks=[0])
    device.insert_tasks(state=state, tasks=[enter], stream=device.default_stream)
    more = Task(TaskKind.MORE_BLOCKS, 0, again, blocks=[7], first_block=1)
    with pytest.raises(InvalidBatch, match="does not hold this request"):
        device.insert_tasks(state=state, tasks=[more], stream=device.default_stream)
