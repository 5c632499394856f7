"""The columns of a batch by native code: what they are by the core's own code, or left to that."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core import AdmittedRequest, Request, StateConfig, TaskBatch
from hal_core.slots import tasks as tasks_module

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=8)
IDS = np.dtype(np.int32)
KINDS = (
    [0, 1],
    (0, 1),
    [0, True],
    [0, 1.5],
    [0, 2**31],
    [0, -(2**31)],
    [np.int32(0), 1],
    np.array([0, 1]),
    [0],
    range(2),
)
BLOCKS = (
    [3],
    np.array([3], np.int32),
    np.array([[3]], np.int32),
    np.array([3.0], np.float32),
    np.array([3, 4, 5, 6], np.int32)[::2],
    np.array([], np.int32),
    np.array([3], np.uint32),
    b"abcd",
    None,
    range(2),
)


def described(made):
    """What a batch is, in values; or the error of making it."""
    try:
        batch = made()
    except Exception as error:  # noqa: BLE001 (compared)
        return type(error).__name__, str(error)
    columns = [bytes(column) for column in batch.native]
    blocks = [ids.tolist() for ids in batch.block_ids]
    names = (
        "kinds",
        "slots",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "block_counts",
        "first_blocks",
        "first_tokens",
    )
    arrays = [(getattr(batch, name).tolist(), getattr(batch, name).dtype) for name in names]
    return batch.plain, batch.requests, columns, blocks, batch.drafts, arrays, batch.all_new, batch.blocks.tolist()


@pytest.mark.parametrize("opened", ["native"], indirect=True)
@pytest.mark.parametrize("which", range(4))
def test_columns_are_the_same_by_both_roads_or_the_same_error(opened, monkeypatch, which):
    """Each of what may be given in place of plain lists."""
    state = opened().state(SIZES)
    requests = [state.admit(Request(f"r{i}", [1] * 9)) for i in range(2)]
    quick = tasks_module._gather
    assert quick is not None
    for odd in BLOCKS if which == 3 else KINDS:
        given_ = [[0, 1], [5, 6], [1, 2], [np.array([1, 2], np.int32), np.array([3], np.int32)]]
        given_[which] = [given_[3][0], odd] if which == 3 else odd

        def make(given_=given_):
            return TaskBatch.prefill(given_[0], requests, given_[2], given_[3], given_[1])

        monkeypatch.setattr(tasks_module, "_gather", quick)
        native_one = described(make)
        monkeypatch.setattr(tasks_module, "_gather", None)
        assert native_one == described(make), odd
    monkeypatch.setattr(tasks_module, "_gather", quick)
    assert quick([0], [0], [1], ["no request"], [given_[3][0]], AdmittedRequest, "request_row", IDS, "dtype") is None
    assert described(lambda: TaskBatch.prefill([0, 1], requests, [1], [[1], [2]]))[0] == "InvalidValue"
