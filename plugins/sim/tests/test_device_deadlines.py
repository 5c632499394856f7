"""Every public call of an opened device, while its stream is held: none waits without the device's deadline."""

import inspect
from contextlib import closing, suppress

import numpy as np
import pytest
from hal_core import (
    Group,
    HalError,
    OutOfMemory,
    Request,
    StateConfig,
    Step,
    Task,
    TaskKind,
    TicketTimeout,
    Writes,
)
from hal_core.devices.update_by_copy import update_by_copy
from hal_core.handover.device_blocks import DeviceBlocks
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.runtime.bound import BoundDevice, bind
from hal_core.runtime.policy import Outbox
from hal_sim import Mode, options
from hal_sim.device import SimDevice

SIZES = StateConfig(num_slots=4, max_model_len=16, block_size=4, max_draft_tokens=2)
DEADLINE = 0.05
"""Seconds; long enough for a ring that has room, as nothing else waits here."""


class UpdatesByCopy(SimDevice):
    """Has no kernel for the update of a step, as a device without ``async_update``."""

    def update_inputs(self, state, step, stream):
        return update_by_copy(self, state, step, stream)

    def copy_within(self, target, value, stream):
        return super(SimDevice, self).copy_within(target, value, stream)


def write(bound, state, stream):
    writes = Writes()
    writes.fill(state.view("next_tokens"), [1], 9)
    return bound.write(writes=writes, stream=stream)


def insert(bound, state, stream):
    admitted = [state.admit(Request(f"r{slot}", [5, 6, 7])) for slot in (0, 1)]
    batch = [Task(TaskKind.PREFILL, slot, one, 0, 3, [slot]) for slot, one in enumerate(admitted)]
    return bound.insert_tasks(state=state, tasks=batch, stream=stream)


def update(bound, state, stream):
    return bound.update_inputs(state=state, step=step_of(state), stream=stream)


def step_of(state):
    return Step(0, {state.name: np.array([1])})


LARGE = np.zeros(1 << 14, np.uint8)
CALLS = {
    "state": lambda bound, state, stream: bound.state(SIZES, name="other"),
    "async_set_value": lambda bound, state, stream: bound.async_set_value(
        target=state.view("seed"), value=state.view("step_idx"), stream=stream
    ),
    "write": write,
    "insert_tasks": insert,
    "update_inputs": update,
    "set_drafts": lambda bound, state, stream: bound.set_drafts(
        state=state, step=step_of(state), drafts={}, stream=stream
    ),
    "save_output": lambda bound, state, stream: bound.save_output(
        state=state, step=step_of(state), sink=Outbox(), stream=stream
    ),
    "copy_out": lambda bound, state, stream: bound.copy_out(
        memory=state.memory, parts=[ByteRange(0, 8)], stream=stream
    ),
    "order_after_reads": lambda bound, state, stream: bound.order_after_reads(memory=state.memory, stream=stream),
    "timed_event": lambda bound, state, stream: bound.timed_event(stream=stream),
    "communicator": lambda bound, state, stream: bound.communicator(group=Group((0,), 0)),
    "open_group": lambda bound, state, stream: bound.open_group(state=state, group=Group((0,), 0)),
    "broadcast_tokens": lambda bound, state, stream: bound.broadcast_tokens(
        state=state, group=Group((0,), 0), stream=stream
    ),
    "counters": lambda bound, state, stream: bound.counters(),
    "observe": lambda bound, state, stream: bound.observe(Observer()),
    "launch_graphs": lambda bound, state, stream: bound.launch_graphs(graphs=[], stream=stream),
    "close": lambda bound, state, stream: bound.close(),
}
"""Every public method; a new one needs its call here."""


class Observer:
    """Sees nothing."""

    def before_call(self, call):
        """Do nothing."""


@pytest.fixture(params=[SimDevice, UpdatesByCopy])
def held(request):
    """An opened device with a held default stream, a state on it, and the limits of all waits made so far."""
    ring = {"ring_start": 1 << 12, "ring_limit": 1 << 13}
    with options(mode=Mode.WORKER, wait_limit_ms=2000), closing(request.param(0, ring)) as device:
        bound, limits = bind(device), []
        state, wait = bound.state(SIZES), device.events.synchronize
        device.staging.deadline = DEADLINE  # the state was opened without it, on however busy a machine
        device.events.synchronize = lambda raw, timeout: (limits.append(timeout), wait(raw, timeout))[1]
        with device.hold_stream(device.default_stream):
            yield bound, state, limits


def test_every_public_call_has_the_deadline(held):
    public = {name for name, _ in inspect.getmembers(BoundDevice, inspect.isfunction) if not name.startswith("_")}
    assert public == {*CALLS}
    bound, state, limits = held
    stream, errors = bound.default_stream, {}
    bound.async_set_value(target=state.view("temperature")[0], value=0.5, stream=stream)
    for name, call in CALLS.items():
        try:
            call(bound, state, stream)
        except HalError as error:
            errors[name] = error
        assert None not in limits, f"{name} waits for the device without a limit"
        assert all(limit <= DEADLINE for limit in limits), f"{name} waits for {limits}"
    assert isinstance(errors["state"], TicketTimeout)


def test_a_value_larger_than_the_ring_and_blocks_that_are_read_have_it_too(held):
    bound, _state, limits = held
    target = bound.device.allocate(LARGE.nbytes)
    view = View.contiguous(target, 0, (LARGE.nbytes,), dtype_of("uint8"))
    with suppress(OutOfMemory):
        bound.async_set_value(target=view, value=LARGE, stream=bound.default_stream)
    with pytest.raises(TicketTimeout):
        DeviceBlocks(bound, target, 4, 64, {}).read([1])
    assert limits
    assert all(limit is not None and limit <= DEADLINE for limit in limits)
