"""The policy around each hook: check, decide, call the plugin's hook at most once, clean up. It is the same on every
device.

It is plain Python and not a pluggy wrapper. A wrapper cannot skip the call, and a plugin's own wrapper would sit
outside it. ``hooks`` is the device itself, or the device with its observers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GroupLost, InvalidBatch, InvalidValue, OutOfMemory, PluginError, SinkClosed, SinkFull
from ..group import Group
from ..memory.dtypes import SCALAR_MAKERS
from ..memory.values import Value, device_value, host_array, prepare, prepare_array, prepare_on_device
from ..memory.views import ByteRange, View
from ..memory.writes import Writes
from ..output.sinks import PendingOutput, Sink
from ..ranks.channel import BroadcastChannel, channel_of
from ..slots.checks import problems
from ..slots.companions import open_states, tasks_of_companion
from ..slots.declared import Companion, StateField
from ..slots.drafts import check_drafts, plan_drafts
from ..slots.int_columns import Int32s
from ..slots.native_columns import native_of
from ..slots.state import SlotState
from ..slots.step import Step
from ..slots.tasks import Task, TaskBatch, check_tasks
from ..tickets import DONE, Ticket

if TYPE_CHECKING:
    from ..contract.device import Device, Hooks
    from ..memory.copies import CopyTicket
    from ..memory.views import Memory
    from ..slots.fields import StateConfig
    from ..streams import Event, Stream


class Outbox:
    """The sink passed to a plugin's ``save_output``: it keeps the one output for the policy (G17)."""

    session = 0

    def __init__(self) -> None:
        self.pending: PendingOutput | None = None

    def put(self, pending: PendingOutput) -> None:
        """Keep the step's output. A second one is refused: a step has one record (G19)."""
        if self.pending is not None:
            raise PluginError("two outputs of one step were put into the sink", cure="put one", hook="save_output")
        self.pending = pending

    def close(self, timeout: float) -> None:
        """Return at once: the policy sends the output."""


class Policy:
    """Host-side decisions around the four hooks. Stateless; one object serves any number of devices."""

    def state(
        self,
        device: Device,
        sizes: StateConfig,
        name: str,
        companions: Sequence[str | Companion] = (),
        fields: Sequence[StateField] = (),
    ) -> SlotState:
        """Create a state. If there is no room for it, raise an error that names its sizes."""
        try:
            return open_states(device, sizes, name, companions, fields)
        except OutOfMemory as error:
            raise error.located(argument="sizes") from error.__cause__
        except MemoryError as error:
            cure = "free memory, or give fewer slots or smaller sizes"
            raise OutOfMemory(f"no room for {sizes}: {error}", cure=cure, argument="sizes") from error

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Resolve the target, convert the value (G6), protect it from changes by the caller (G2), then write it."""
        view = target if type(target) is View else device.resolve(target)
        if view.memory.device is not device:
            raise InvalidValue(
                "the target is memory of another opened device", cure="write it with that device", argument="target"
            )
        if not (view._known_apart or view.elements_apart):  # usually computed before
            raise InvalidValue(
                f"the target {view} has overlapping elements: the result would be undefined",
                cure="write to the tensor that it was expanded from, or to a contiguous one",
                argument="target",
            )
        prepared: Value
        maker = SCALAR_MAKERS.get((view.dtype, type(value)))  # Most values are plain scalars; this saves a Python call.
        if maker is not None:
            prepared = maker(value)
        elif type(value) is View or device.is_device_value(value):
            source = value if type(value) is View else device_value(device.resolve, value)
            if source.memory.device is not device:
                raise InvalidValue(
                    "the value is on another opened device", cure="copy it to the host first", argument="value"
                )
            prepared = prepare_on_device(view, source)
        else:
            tensor = host_array(value)
            prepared = prepare(view, value) if tensor is None else prepare_array(view, *tensor)
        if 0 in view.shape:
            return DONE
        if isinstance(owner := view.owner, SlotState):
            if owner.unusable:
                owner.check_usable()
            if owner._readers:
                owner.wait_for_readers(None, stream)
        return _ticket(hooks.async_set_value(device=device, target=view, value=prepared, stream=stream))

    def write(self, device: Device, writes: Writes, stream: Stream) -> Ticket:
        """Check where the writes go, order them after steps that read a state's slots, and submit them."""
        plans = writes.plans()
        if any(plan.memory.device is not device for plan in plans):
            raise InvalidValue(
                "a target is memory of another opened device", cure="resolve it with that device", argument="writes"
            )
        for owner in writes.owners.values():
            if isinstance(owner, SlotState):
                owner.check_usable()
                owner.wait_for_readers(None, stream)
        return _ticket(device.submit_all(plans, stream))

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Check the whole batch (G8), order it after the slots' last readers (G28), write it, then book it."""
        batch = tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks, native_of(device))
        check_state(device, state)
        if not batch.requests:
            return DONE
        twin = state.host_table.twin
        if twin is None or not twin.sound(batch):  # that check covers the sizes too
            batch.check_sizes(state.layout)
            if found := problems(state.host_table, batch):
                raise InvalidBatch(found)
        state.wait_for_readers_of_batch(batch, stream)
        companions = [(one, tasks_of_companion(one, batch)) for one in state.companions] if state.companions else ()
        for companion, own in companions:
            companion.wait_for_readers_of_batch(own, stream)
        ticket = _ticket(hooks.insert_tasks(device=device, state=state, tasks=batch, stream=stream))
        for companion, own in companions:
            companion.host_table.commit(own)
        state.host_table.commit(batch)
        if state.speculative:
            state.drafts.follow(batch)
        return ticket

    def broadcast_tokens(self, device: Device, hooks: Hooks, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """Broadcast a header and the slice in the plugin's one collective, and check it; a group of one communicates
        nothing (G15).

        If the group is lost before or during the call, the ticket raises (G16).
        """
        check_state(device, state)
        if len(group.ranks) == 1:
            return DONE
        device.check_stream(stream)  # checked before counting: ranks identify broadcasts by their number
        channel = channel_of(state, group) or self._open_group(device, state, group)
        channel.begin(stream)
        try:
            ticket = _ticket(hooks.broadcast_tokens(device=device, state=state, group=group, stream=stream))
        except GroupLost as error:
            return channel.lost(error)
        return channel.checked(ticket, stream)

    def open_group(self, device: Device, state: SlotState, group: Group) -> None:
        """Open the group ahead of the first broadcast; once for each state and group."""
        if group.size > 1 and channel_of(state, group) is None:
            self._open_group(device, state, group)

    def _open_group(self, device: Device, state: SlotState, group: Group) -> BroadcastChannel:
        """Compare the state's configuration on all ranks of the group, before its first broadcast (G14)."""
        check_state(device, state)
        channel = BroadcastChannel(device, state, group, device.communicator(group))
        state.channels[group.ranks] = channel
        return channel

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Copy the output, clean up after that copy on every rank (G18), then send on the first rank (G17)."""
        check_state(device, state)
        order = _check_step(state, step)
        outbox = Outbox()
        first = step.group.is_first
        if first and isinstance(sink, type):
            raise no_sink(sink)
        send = sink.put if first else outbox.put  # looked up before any work, so that an object without put fails here
        try:
            ticket = _ticket(hooks.save_output(device=device, state=state, step=step, sink=outbox, stream=stream))
        finally:
            if state.host_table.preempted or state.host_table.aborted:
                device.submit(state.cleanup_plan(order), stream)
                state.host_table.reported(order.tolist())
            # A companion's output is never saved: the target's reports the requests that left its slots.
            for companion in state.companions:
                if left := {*companion.host_table.preempted, *companion.host_table.aborted}:
                    device.submit(companion.cleanup_plan(np.array([*left])), stream)
                    companion.host_table.reported([*left])
        state.drafts.saved = step.number
        if outbox.pending is None:
            raise PluginError("save_output put no output into its sink", cure="call sink.put once", hook="save_output")
        if not first:
            outbox.pending.complete(None)
            return ticket
        try:
            send(outbox.pending)
        except SinkFull as error:
            error.ticket = ticket
            raise
        except SinkClosed as error:  # Not taken: the ticket gives the tokens that will not be sent (G19).
            error.ticket = ticket
            outbox.pending.complete(error)
            raise
        return ticket

    def copy_out(self, device: Device, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Check that the bytes are this device's, then copy them."""
        _check_memory(device, memory)
        if not isinstance(parts, Sized):  # an iterator, which can be read only once
            check_parts(parts)  # type: ignore[unreachable]  # the caller may ignore the annotation
        for part in parts:
            if part.offset < 0 or part.nbytes < 0 or part.end > memory.nbytes:
                raise InvalidValue(
                    f"bytes {part.offset} to {part.end} of {memory.nbytes}",
                    cure="give ranges inside the memory",
                    argument="parts",
                )
        return device.copy_out(memory, parts, stream)

    def order_after_reads(self, device: Device, memory: Memory, stream: Stream) -> None:
        """Check that the memory is this device's, then order the stream after the copies out that still read it."""
        _check_memory(device, memory)
        device.order_after_reads(stream, memory)

    def update_inputs(self, device: Device, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Advance the state by one step, and book that the step reads the state (G28).

        The update reads every slot, whatever slots the step's order names: a request that entered another slot
        meanwhile would run.
        """
        order = check_update(device, state, step)
        ticket = device.update_inputs(state, step, stream)
        advanced(state, step, order, device.event(stream) if device.capabilities.async_h2d else None)
        return ticket

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Check that the drafts come in order and fit, and write them after the slots' last readers (G28), in one
        submission."""
        check_state(device, state)
        _check_step(state, step)
        found = check_drafts(state, step, drafts)
        ticket: Ticket = DONE
        if found:
            state.wait_for_readers(np.array(list(found)), stream)
            ticket = _ticket(device.submit(plan_drafts(state, found), stream))
        state.drafts.handed = step.number
        state.drafts.holders = {slot: int(state.host_table.admission_ids[slot]) for slot in found}
        return ticket


def check_update(device: Device, state: SlotState, step: Step) -> Int32s:
    """Return the step's order for this state, after checking that this step may advance it."""
    check_state(device, state)
    order = _check_step(state, step)
    state.drafts.check_update(state.mirror, step)
    return order


def advanced(state: SlotState, step: Step, order: Int32s, event: Event | None) -> None:
    """Book that a step advances the state; ``event``: after the work of the step, None if that is done."""
    state.updates += 1
    state.drafts.advanced(step)
    state.host_table.appended(order, state.sizes.max_accept if step.speculative else 1)
    if event is not None:
        state.add_reader(None, event)


def _check_memory(device: Device, memory: Memory) -> None:
    """Raise :class:`InvalidValue` for another device's memory, and for an object that is not memory, as a state."""
    if getattr(memory, "device", None) is not device or not hasattr(memory, "nbytes"):
        raise InvalidValue(
            f"{memory!r} is not memory of this device", cure="give state.memory, or a view's", argument="memory"
        )


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Raise :class:`InvalidValue` for an argument of the wrong type. Checked only after a call has failed, as it costs
    time."""
    for name, given in arguments.items():
        kind, cure = _KINDS.get(name, (object, ""))
        if not isinstance(given, kind):
            raise InvalidValue(f"{given!r} is no {kind.__name__}", cure=cure, argument=name)
        if name == "tasks":
            check_tasks(given)
        if name == "parts":
            check_parts(given)
        if name == "memory" and not (hasattr(given, "address") and hasattr(given, "nbytes")):
            raise InvalidValue(f"{given!r} is no memory", cure="give state.memory, or a view's", argument=name)
        if name == "sink" and _sends(arguments) and not callable(getattr(given, "put", None)):
            raise no_sink(given)


def check_parts(parts: object) -> None:
    """Raise :class:`InvalidValue` for anything but byte ranges in a list or the like."""
    if not isinstance(parts, Sized) or not isinstance(parts, Iterable):
        raise InvalidValue(f"{parts!r} is no list of ByteRange", cure=BYTE_RANGES, argument="parts")
    for at, part in enumerate(parts):
        valid = isinstance(part, ByteRange) and all(isinstance(n, int | np.integer) for n in (part.offset, part.nbytes))
        if not valid:
            raise InvalidValue(f"entry {at} is {part!r}, which is no ByteRange", cure=BYTE_RANGES, argument="parts")


def _sends(arguments: Mapping[str, object]) -> bool:
    """Return True on the rank that sends; the others need no sink."""
    step = arguments.get("step")
    return isinstance(step, Step) and step.group.is_first


def is_stream(stream: object) -> bool:
    """Return True for an object with the methods of a stream. A device without asynchrony would accept any object."""
    methods = ("record", "wait", "synchronize")
    return not isinstance(stream, type) and all(callable(getattr(stream, method, None)) for method in methods)


def no_stream(stream: object) -> InvalidValue:
    """Return the error for an object that is not a stream."""
    return InvalidValue(
        f"{stream!r} is not a stream",
        cure="give device.default_stream, one that device.stream() made, or a stream of a framework on this device",
        argument="stream",
    )


BYTE_RANGES = (
    "give a list of ByteRange(offset, nbytes), whole numbers; for a view: first, end = view.bounds(), and"
    " ByteRange(first, end - first)"
)


def no_sink(sink: object) -> InvalidValue:
    """Return the error for an object that is not a sink."""
    why = "it is a class, and no object of one" if isinstance(sink, type) else "it has no method put(output)"
    return InvalidValue(f"{sink!r} is not a sink: {why}", cure="give a MemorySink() or open_sink(url)", argument="sink")


_KINDS: dict[str, tuple[type, str]] = {
    "state": (SlotState, "give what device.state(StateConfig(…)) returned"),
    "step": (Step, "give Step(number, {state.name: slots})"),
    "group": (Group, "give Group(ranks, rank), or ALONE"),
    "writes": (Writes, "make writes = Writes(), call writes.set(view, value) for each value, and give writes"),
}


def _ticket(result: object) -> Ticket:
    """Check that a plugin's hook returned a ticket; None would hide a hook without effect."""
    if type(result) not in _tickets:  # isinstance is slow for an abstract class
        if not isinstance(result, Ticket):
            raise PluginError(f"the plugin's hook returned {result!r}", cure="return a Ticket, never None")
        _tickets.add(type(result))
    return result  # type: ignore[return-value]


_tickets: set[type] = set()


def check_state(device: Device, state: SlotState) -> None:
    """Raise :class:`InvalidValue` for anything but a state of this device, :class:`StateUnusable` for an unusable
    one."""
    if not isinstance(state, SlotState):
        raise InvalidValue(f"{type(state).__name__} is not a SlotState", cure="make a SlotState", argument="state")
    if state.device is not device:
        raise InvalidValue("the state belongs to another opened device", cure="use its own device", argument="state")
    if state.unusable:
        state.check_usable()


def _check_step(state: SlotState, step: Step) -> Int32s:
    """Return the step's order for this state, after checking all bounds that the host knows (G21)."""
    order = step.order(state.name)
    state.check_slots(step.spans[state.name], "step")
    if step.speculative and not state.speculative:
        raise InvalidValue(
            "a speculative step on a state without drafts", cure="give StateConfig(max_draft_tokens=…)", argument="step"
        )
    if step.logprobs is not None and not 0 <= step.logprobs <= state.sizes.max_logprobs:
        raise InvalidValue(
            f"{step.logprobs} log-probabilities, but the state holds {state.sizes.max_logprobs}",
            cure="ask for less, or give StateConfig(max_logprobs=…)",
            argument="step",
        )
    return order
