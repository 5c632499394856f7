"""One call of each hook and primitive on a small working state, applied to the device and its model.

For checks that hold for every call. Each act updates the model to the state after the call's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from hal_core.group import ALONE
from hal_core.memory.views import ByteRange
from hal_core.output.sinks import MemorySink, Sink
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hal_core.tickets import Ticket

from ..harness.backdoor import PATIENCE, arrive
from ..kit import Kit
from .rig import Rig

SIZES = StateConfig(num_slots=5, max_model_len=24, block_size=4, max_draft_tokens=2, max_logprobs=1)
ENTERED = 3
"""Slots with requests; the last two are free."""

Act = Callable[[Rig], Ticket]


def working(kit: Kit, *, name: str = "target") -> Rig:
    """Return a state with requests in all slots but two, after one step and its output."""
    rig = Rig(kit, SIZES, name=name)
    rig.insert([entering(rig, slot) for slot in range(ENTERED)]).wait(PATIENCE)
    rig.poke({"sampled_token_ids": 10 + np.arange(SIZES.num_slots)}).wait(PATIENCE)
    step = rig.step(range(ENTERED))
    rig.update_inputs(step).wait(PATIENCE)
    rig.output(step)
    return rig


def entering(rig: Rig, slot: int) -> Task:
    """Return a task that puts a new request of three tokens into a slot."""
    request = rig.admit(Request(rig.new_name(), [1, 2, 3], SamplingParams(max_tokens=9)))
    return Task(TaskKind.PREFILL, slot, request, 0, 3, [slot])


def leaving(rig: Rig, slot: int, kind: TaskKind = TaskKind.PREEMPTED) -> Task:
    """Return a task that removes the request from a slot."""
    return Task(kind, slot, rig.model.residents[slot].admitted)


def _set(rig: Rig, name: str, value: Any, key: tuple[slice, ...] = ()) -> Ticket:  # noqa: ANN401 (any value)
    view = rig.state.view(name)
    target = view[key] if key else view
    ticket = rig.bound.async_set_value(target=target, value=value, stream=rig.stream)
    rig.model.cells[name][key or ...] = value
    return ticket


def scalar(rig: Rig) -> Ticket:
    """Fill a field with one element."""
    return _set(rig, "seed", 41)


def array(rig: Rig) -> Ticket:
    """Write a contiguous array."""
    return _set(rig, "temperature", np.arange(SIZES.num_slots, dtype=np.float32).reshape(-1, 1) / 8)


def strided(rig: Rig) -> Ticket:
    """Write an array into a view with strides, one of them negative."""
    shape = rig.model.cells["bad_words"][::2, ::-3].shape
    value = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    return _set(rig, "bad_words", value, (slice(None, None, 2), slice(None, None, -3)))


def on_device(rig: Rig) -> Ticket:
    """Write a value that is already on the device."""
    view = rig.state.view("top_p")
    ticket = rig.bound.async_set_value(target=rig.state.view("min_p"), value=view, stream=rig.stream)
    rig.model.cells["min_p"][...] = rig.model.cells["top_p"]
    return ticket


def insert(rig: Rig) -> Ticket:
    """Insert a request into a free slot."""
    free = next(slot for slot in range(SIZES.num_slots) if slot not in rig.model.residents)
    return rig.insert([entering(rig, free)])


def leave(rig: Rig) -> Ticket:
    """Preempt one request and abort another."""
    first, second, *_ = sorted(rig.model.residents)
    return rig.insert([leaving(rig, first), leaving(rig, second, TaskKind.ABORTED)])


def update_inputs(rig: Rig) -> Ticket:
    """Run a step over all slots."""
    return rig.update_inputs(rig.step(range(SIZES.num_slots)))


def save(rig: Rig, sink: Sink | None = None) -> Ticket:
    """Save the output of a step that has already advanced the state."""
    step = rig.step(range(SIZES.num_slots))
    return rig.save(step, MemorySink(threaded=True) if sink is None else sink)


def broadcast(rig: Rig) -> Ticket:
    """Broadcast in a group of one."""
    return rig.bound.broadcast_tokens(state=rig.state, group=ALONE, stream=rig.stream)


def submit(rig: Rig) -> Ticket:
    """Submit a plan, as a kernel of the worker would write."""
    return rig.poke({"sampled_token_ids": 20 + np.arange(SIZES.num_slots)})


def copy_out(rig: Rig) -> Ticket:
    """Copy the whole state to the host."""
    return rig.device.copy_out(rig.state.memory, [ByteRange(0, rig.state.layout.nbytes)], rig.stream)


VALUES: Mapping[str, Act] = {"a scalar": scalar, "an array": array, "strided": strided, "on the device": on_device}
WRITES: Mapping[str, Act] = {**VALUES, "insert": insert, "leave": leave}
HOOKS: Mapping[str, Act] = {**WRITES, "update_inputs": update_inputs, "save_output": save, "broadcast": broadcast}
ACTS: Mapping[str, Act] = {**HOOKS, "submit": submit, "copy_out": copy_out}


def again(rig: Rig, what: str) -> None:
    """Make a call of ``ACTS``, "insert and leave" or "a step", and return to the state before it."""
    if what == "insert and leave":
        arrive(insert(rig))
        arrive(rig.insert([leaving(rig, max(rig.model.residents))]))
        rig.output(rig.step(range(SIZES.num_slots)))
    elif what == "a step":
        arrive(submit(rig))
        arrive(rig.update_inputs(rig.step(range(ENTERED))))
        rig.output(rig.step(range(ENTERED)))
    else:
        arrive(ACTS[what](rig))
