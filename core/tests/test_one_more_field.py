"""One more field in the slot table is one line in it: every part that handles fields finds it there."""

from dataclasses import replace

import numpy as np
import pytest
from hal_core import Request, SamplingParams, StateConfig, TaskBatch
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import host_view
from hal_core.memory.dtypes import dtype_of
from hal_core.runtime.bound import bind
from hal_core.slots.fields import STATE_TABLE, Field
from hal_core.slots.layout import lay_out
from hal_core.slots.state import SlotState

SIZES = StateConfig(num_slots=12, max_model_len=40, block_size=4)
BIAS = Field("bias", dtype_of("float32"), "1", 2.5, frozenset({"step_input"}), True, "min_p")
"""Read by the step, and filled from a parameter; an empty slot has 2.5."""


def with_field(field):
    """The slot table with one more line, among the fields that a step reads."""
    at = next(place for place, known in enumerate(STATE_TABLE) if known.name == "temperature")
    return (*STATE_TABLE[:at], field, *STATE_TABLE[at:])


@pytest.fixture
def bound():
    with bind(CpuPlugin.open(0, {})) as device:
        yield device


@pytest.mark.parametrize("n", [1, 12])
def test_a_line_in_the_slot_table_is_all_that_a_field_needs(bound, n):
    state = SlotState(bound.device, SIZES, table=with_field(BIAS))
    assert host_view(state.view("bias")).tolist() == [[2.5]] * SIZES.num_slots, "reset"
    requests = [state.admit(Request(f"r{i}", [1, 2, 3], SamplingParams(min_p=i / 16))) for i in range(n)]
    tasks = TaskBatch.prefill(range(n), requests, [3] * n, [[i] for i in range(n)])
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait()
    part = state.layout.groups["step_input"]
    copied = bound.copy_out(memory=state.memory, parts=[part], stream=bound.default_stream)
    copied.wait()
    columns = state.columns(copied.data[0], part)
    expected = [i / 16 for i in range(n)] + [2.5] * (SIZES.num_slots - n)
    np.testing.assert_array_equal(columns["bias"][:, 0], np.array(expected, np.float32))
    assert columns["min_p"][:n, 0].tolist() == expected[:n], "its neighbours are where they were"


def test_ranks_and_requests_of_another_table_are_told_apart():
    """The digest that ranks compare, and the config key that admitted requests carry."""
    plain, longer = lay_out(SIZES), lay_out(SIZES, with_field(BIAS))
    assert plain.digest != longer.digest
    assert plain.config_key != longer.config_key


def test_a_field_that_no_parameter_fills_keeps_its_reset_value(bound):
    state = SlotState(bound.device, SIZES, table=with_field(replace(BIAS, param="")))
    request = state.admit(Request("r", [1, 2, 3]))
    tasks = TaskBatch.prefill([0], [request], [3], [[0]])
    bound.insert_tasks(state=state, tasks=tasks, stream=bound.default_stream).wait()
    assert host_view(state.view("bias"))[0, 0] == 2.5
