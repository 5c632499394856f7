"""Native columns of a batch: the same as the core's own code makes, or left to that code."""

import gc

import numpy as np
import pytest
from hal_core import AdmittedRequest, Request, SamplingParams, SplitRole, StateConfig, Task, TaskBatch, TaskKind
from hal_core.slots.native_columns import TASK_NAMES
from msgspec.structs import replace

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=8)
IDS = np.dtype(np.int32)


class Own(np.ndarray):
    """A subclass."""


BLOCKS = (
    [3],
    np.array([3], np.int32),
    np.array([[3]], np.int32),
    np.array([3.0], np.float32),
    np.array([3, 4, 5, 6], np.int32)[::2],
    np.array([], np.int32),
    np.array([3], np.uint32),
    np.arange(9, dtype=np.int32)[2:5],
    np.arange(9, dtype=np.int32)[5:2:-1],
    np.arange(9, dtype=np.int32)[::8][:1],
    np.array([3, 4], ">i4"),
    np.array(3, np.int32),
    np.array([3, 4], np.int32).view(Own),
    b"abcd",
    None,
    range(2),
)


def described(made):
    """Return a batch's values, or the error of making it."""
    try:
        batch = made()
    except Exception as error:  # noqa: BLE001 (compared)
        return type(error).__name__, str(error)
    blocks = [ids.tolist() for ids in batch.block_ids]
    return batch.plain, batch.requests, batch.ints, batch.rows, blocks, batch.drafts, batch.blocks.tolist()


def test_columns_of_tasks_are_the_same_by_both_roads_or_the_same_error(opened):
    """For each kind of value that a task may have in place of plain numbers and lists, and each kind of task."""
    state = opened().state(SIZES)
    request, prefills, ends = (
        state.admit(Request("r", [1] * 9, params, role=role))
        for params, role in (
            (SamplingParams(), SplitRole.MIXED),
            (SamplingParams(), SplitRole.PREFILL),
            (SamplingParams(max_tokens=1), SplitRole.MIXED),
        )
    )
    odd = {
        "slot": [1, True, 1.5, 2**31, np.int32(3)],
        "num_computed_tokens": [9, -1, None],
        "first_block": [0, 2, -(2**31)],
        "first_token": [5, 2**31, -7],
        "blocks": BLOCKS,
        "drafts": [(), [1, 2], (2**31,), [True], [np.int64(3)], np.array([1, 2])],
        "request": [request, prefills, ends],
    }
    native = state.device.native_columns
    quick, natively = native.of_tasks, 0
    for kind in TaskKind:
        plain = Task(kind, 2, request, 9, 0, [3, 4], first_token=5 if kind > 1 else -1)
        for name, values in odd.items():
            for value in values:
                tasks = [plain, replace(plain, slot=3), replace(plain, **{name: value})]
                natively += quick(tasks, Task, AdmittedRequest, TASK_NAMES, IDS, np.ndarray) is not None
                native_one = described(lambda tasks=tasks: TaskBatch.of(tasks, native))
                assert native_one == described(lambda tasks=tasks: TaskBatch.of(tasks)), (kind, name, value)
    assert natively > 40
    for wrong in ((), (1,) * 5, ([plain], Task, AdmittedRequest, (), IDS)):
        with pytest.raises(TypeError):
            quick(*wrong)
    for none in ([], [1], "ab", [plain, None]):
        assert quick(none, Task, AdmittedRequest, TASK_NAMES, IDS, np.ndarray) is None


class Changes:
    """Garbage in a circle, which changes a list when it is collected."""

    def __init__(self, act):
        self.act, self.own = act, self

    def __del__(self):
        self.act()


@pytest.mark.parametrize("act", [lambda tasks: tasks.clear(), lambda tasks: tasks.append(tasks[0])])
def test_a_list_of_tasks_may_change_in_a_collection(opened, act):
    """Python 3.11 may collect when a tuple is made: the batch is of the list as it was, or left to the core."""
    state, threshold = opened().state(SIZES), gc.get_threshold()
    quick = state.device.native_columns.of_tasks
    tasks = [Task(TaskKind.PREFILL, i, state.admit(Request(f"r{i}", [1] * 4)), 0, 4, [i]) for i in range(8)]
    given_, others = (tasks, Task, AdmittedRequest, TASK_NAMES, IDS, np.ndarray), []
    gc.collect()
    gc.disable()
    try:
        Changes(lambda: act(tasks))
        gc.set_threshold(1, 1000, 1000)
        others.extend([] for _ in range(50))
        gc.enable()
        found = quick(*given_)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert found is None or len(found[2]) == 8
