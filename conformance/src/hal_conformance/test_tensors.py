"""A framework's tensor over a state's field shares its memory: a model reads the hooks' writes in place."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hal_core.errors import DeviceClosed, Unavailable
from hal_core.slots.admission import Request
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .harness.asserts import assert_raises
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit

SIZES = StateConfig(num_slots=512, max_model_len=256, block_size=16, max_draft_tokens=3)


@guarantee(1, requires="tensors")
def test_g01_a_tensor_over_a_field_shows_what_hooks_write_later(kit: Kit) -> None:
    bound, support = kit.bound, kit.subject.support
    state = bound.state(SIZES)
    support.tensor(kit.device, np.zeros(4, np.int64))  # its framework is imported from now on
    try:
        tensors = {name: state.tensor(name) for name in ("block_tables", "token_ids", "accept_num", "stop_flags")}
    except Unavailable as error:  # which a device may be, with a reason
        pytest.skip(str(error))
    admitted = state.admit(Request("r", list(range(100, 140))))
    arrive(
        bound.insert_tasks(
            state=state,
            tasks=[Task(TaskKind.PREFILL, 511, admitted, 0, 40, [7, 5, 3])],
            stream=bound.default_stream,
        )
    )
    arrive(bound.async_set_value(target=state.view("accept_num")[510], value=3, stream=bound.default_stream))
    seen = {name: support.values_of(kit.device, tensor) for name, tensor in tensors.items()}
    assert seen["block_tables"][511, :3].tolist() == [7, 5, 3], "the tensor of block_tables is not the state's memory"
    assert seen["token_ids"][511, :40].tolist() == list(range(100, 140)), "the tensor of token_ids is not the state's"
    assert seen["accept_num"][:, 0].tolist() == [0] * 510 + [3, 0], "a value was written, but its tensor has other ones"
    assert seen["stop_flags"].dtype == np.bool_
    assert seen["stop_flags"][:, 0].tolist() == [True] * 511 + [False], "one slot runs, but the tensor disagrees"


def outlived(kit: Kit) -> object:
    """Return a tensor over a field of a dropped state, of a closed device."""
    bound = kit.open()
    state = bound.state(SIZES)
    try:
        tensor: object = state.tensor("token_ids")
    except Unavailable as error:
        bound.close()
        pytest.skip(str(error))
    task = Task(TaskKind.PREFILL, 511, state.admit(Request("r", list(range(100, 140)))), 0, 40, [7, 5, 3])
    arrive(bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream))
    bound.close()
    assert_raises(DeviceClosed, lambda: state.tensor("token_ids"), "asking a closed device for a tensor")
    return tensor


@guarantee(1, also=(26,), requires="tensors")
def test_g01_a_tensor_keeps_its_memory_when_its_state_and_device_are_gone(kit: Kit) -> None:
    support = kit.subject.support
    support.tensor(kit.device, np.zeros(4, np.int64))  # its framework is imported from now on
    tensor = outlived(kit)
    gc.collect()
    others = [kit.bound.state(SIZES) for _ in range(4)]  # one of them would reuse that state's memory
    seen = support.values_of(kit.device, tensor)
    assert others
    assert seen[511, :40].tolist() == list(range(100, 140)), "a tensor that outlived its device shows something else"
