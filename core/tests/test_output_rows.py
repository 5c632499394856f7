"""The fast builder of token-only records gives the same record as the general builder, or defers to it (G21)."""

import numpy as np
import pytest
from hal_core import FinishReason, InvalidValue, Request, SlotStatus, StateConfig, TaskBatch
from hal_core.devices.cpu import CpuPlugin
from hal_core.frames import decode, encode
from hal_core.output.rows import OutputSnapshot, _any_record, build_record
from hal_core.runtime.bound import bind
from hal_core.slots.step import Step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import share

SLOTS = 4
SIZES = StateConfig(num_slots=SLOTS, max_model_len=16, max_draft_tokens=2)


@pytest.fixture(scope="module")
def state():
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(SIZES)
        requests = [state.admit(Request(f"r{i}", [1, 2])) for i in range(SLOTS)]
        batch = TaskBatch.prefill(range(SLOTS), requests, [2] * SLOTS, [[i] for i in range(SLOTS)])
        device.insert_tasks(state=state, tasks=batch, stream=device.default_stream)
        yield state


def columns_of(state, **changed):
    """The output fields after a step that gave each slot one token, apart from the given changes."""
    plain = {
        "accept_num": [1] * SLOTS,
        "step_idx": [3] * SLOTS,
        "draft_num": [0] * SLOTS,
        "stop_reason": [0] * SLOTS,
        "sampled_token_ids": [5, 6, 7, 8],
        "request_serial": [request.admission_id for request in state.host_table.requests],
        "accept_tokens": 10 + np.arange(SLOTS * SIZES.max_accept),
        "draft_tokens": [[9] * SIZES.max_draft_tokens] * SLOTS,
    }
    fields = state.layout.fields
    return {
        name: np.array(values, fields[name].field.dtype.storage).reshape(SLOTS, -1)
        for name, values in (plain | changed).items()
    }


def some(*values):
    return st.lists(st.sampled_from(values), min_size=SLOTS, max_size=SLOTS)


@settings(max_examples=share.of(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), order=st.permutations(range(SLOTS)), speculative=st.booleans())
def test_g20_g21_both_ways_say_the_same(state, data, order, speculative):
    admission_ids = [request.admission_id for request in state.host_table.requests]
    changed = {
        "accept_num": data.draw(some(0, 1, 1, 1, 2, 3, 4, -1), label="accept_num"),
        "step_idx": data.draw(some(0, 1, 3), label="step_idx"),
        "draft_num": data.draw(some(0, 0, 0, 2, 3, -1), label="draft_num"),
        "stop_reason": data.draw(some(0, 0, 1, 2, 3, -1), label="stop_reason"),
        "request_serial": [admission_id + data.draw(st.sampled_from([0, 0, 0, 1])) for admission_id in admission_ids],
    }
    step = Step(1, {"target": np.array(order)}, speculative=speculative)
    columns, facts = columns_of(state, **changed), OutputSnapshot.of(state, step)
    assert facts.plain
    record, batch_ids, violation = build_record(columns, facts)
    expected, expected_ids, expected_violation = _any_record(columns, facts)
    assert record == expected
    assert batch_ids == expected_ids
    assert str(violation) == str(expected_violation)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("accept_num", 2, "2 tokens (at most 1)"),
        ("accept_num", -1, "-1 tokens (at most 1)"),
        ("draft_num", 3, "3 drafts (at most 2)"),
        ("draft_num", -1, "-1 drafts (at most 2)"),
        ("step_idx", 0, "0 generated in all"),
        ("request_serial", 10**9, "the slot holds admission 1000000000"),
        ("stop_reason", 3, "stop_reason is 3, but a step gives 0 to 2"),
        ("stop_reason", 256, "stop_reason is 256"),
        ("stop_reason", -1, "stop_reason is -1"),
    ],
)
def test_g21_a_plain_steps_bad_values_are_errors_of_their_rows_only(state, field, value, message):
    columns = columns_of(state)
    columns[field][2] = value
    record, _, violation = build_record(columns, OutputSnapshot.of(state, Step(1, {"target": np.arange(SLOTS)})))
    assert message in str(violation)
    assert [row for row, text in record.messages.items() if text] == [2]
    assert record.tokens.tolist() == [5, 6, 8]


def test_g21_an_error_that_is_known_late_is_reported_with_its_own_step(state):
    """The step itself stopped the slot, so it gives no token; the host learns that from the output."""
    late = {2: "logits were no use"}
    columns = columns_of(state, accept_num=[1, 1, 0, 1], step_idx=[3, 3, 2, 3])
    step = Step(1, {"target": np.arange(SLOTS)}, late_errors=lambda: late)
    record, _, violation = build_record(columns, OutputSnapshot.of(state, step))
    assert violation is None
    assert record.status.tolist() == [SlotStatus.TOKEN, SlotStatus.TOKEN, SlotStatus.ERROR, SlotStatus.TOKEN]
    assert record.finish.tolist() == [0, 0, FinishReason.ERROR, 0]
    assert (record.tokens.tolist(), record.messages) == ([5, 6, 8], late)
    late.clear()
    assert build_record(columns, OutputSnapshot.of(state, step))[0].messages == {}


@pytest.mark.parametrize("name", ["errors", "recovered", "late_errors"])
def test_a_lone_surrogate_in_a_steps_message_is_escaped_as_no_frame_carries_it(state, name):
    given = {1: "no \udc80 table: nö"}
    step = Step(1, {"target": np.arange(SLOTS)}, **{name: (lambda: given) if name == "late_errors" else given})
    record, _, _ = build_record(columns_of(state), OutputSnapshot.of(state, step))
    assert record.messages == {1: "no \\udc80 table: nö"}
    assert decode(encode(record, session=1, sender=0, sequence=0)).record == record


def test_a_late_message_that_is_no_text_is_refused(state):
    step = Step(1, {"target": np.arange(SLOTS)}, late_errors=lambda: {1: OSError("no table")})
    with pytest.raises(InvalidValue, match="messages has 1: OSError"):
        build_record(columns_of(state), OutputSnapshot.of(state, step))
