"""A step reads every slot of its state (G28): a request that enters an unnamed slot must not run in it."""

from pathlib import Path

import numpy as np
import pytest
from hal_core import Request, StateConfig, Step, Task, TaskKind
from hal_core.errors import TicketTimeout
from hal_core.memory.views import ByteRange
from hal_core.runtime.bound import bind

PATIENCE = 60.0


@pytest.fixture
def bound(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from queued_device import queued

    with bind(queued()) as opened:
        yield opened


def entering(state, slot):
    return [Task(TaskKind.PREFILL, slot, state.admit(Request(f"r{slot}", [1, 2])), 0, 2, [slot])]


def test_a_request_in_an_unnamed_slot_does_not_run_in_a_pending_step(bound):
    device, state = bound.device, bound.state(StateConfig(num_slots=3, max_model_len=8))
    compute, other = device.stream(), device.stream()
    bound.insert_tasks(state=state, tasks=entering(state, 0), stream=compute).wait(PATIENCE)
    with device.hold_stream(compute):
        step = Step(1, {"target": np.array([0], np.int32)})
        stepped = bound.update_inputs(state=state, step=step, stream=compute)
        entered = bound.insert_tasks(state=state, tasks=entering(state, 2), stream=other)
        with pytest.raises(TicketTimeout):
            entered.wait(0.02)
    for ticket in (stepped, entered):
        ticket.wait(PATIENCE)
    place = state.layout.fields["seq_lens_encoder"]
    copied = device.copy_out(state.memory, [ByteRange(place.offset, place.stride * 3)], other)
    copied.wait(PATIENCE)
    assert copied.data[0].view(np.int32).tolist() == [0, 0, 2], "slot 0 has run its prompt, slot 2 not yet"


def test_a_state_waits_for_no_step_of_another(bound):
    device = bound.device
    one, other = (
        bound.state(StateConfig(num_slots=2, max_model_len=8)),
        bound.state(StateConfig(num_slots=2, max_model_len=8), name="other"),
    )
    compute, beside = device.stream(), device.stream()
    with device.hold_stream(compute):
        stepped = bound.update_inputs(state=one, step=Step(1, {"target": np.array([0], np.int32)}), stream=compute)
        bound.insert_tasks(state=other, tasks=entering(other, 1), stream=beside).wait(PATIENCE)
        assert not stepped.done()
    stepped.wait(PATIENCE)
