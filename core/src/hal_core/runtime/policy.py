"""The policy around each hook: check, decide, call the plugin's hook at most once, clean up. The same on every device.

It is plain Python and not a pluggy wrapper: a wrapper cannot decide not to call, and a plugin's own would sit outside
it. ``hooks`` is the device itself, or the way to it past its observers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GroupLost, InvalidBatch, InvalidValue, OutOfMemory, PluginError, SinkClosed, SinkFull
from ..group import Group
from ..memory.dtypes import SCALAR_MAKERS
from ..memory.values import Value, device_value, host_array, prepare, prepare_array, prepare_on_device
from ..memory.views import View
from ..output.sinks import PendingOutput, Sink
from ..ranks.channel import BroadcastChannel, channel_of
from ..slots.checks import is_sound, problems
from ..slots.companions import open_states, tasks_beside
from ..slots.drafts import check_drafts, plan_drafts
from ..slots.state import SlotState
from ..slots.step import Step
from ..slots.tasks import Task, TaskBatch
from ..slots.tasks import check_kinds as check_tasks
from ..tickets import DONE, Ticket

if TYPE_CHECKING:
    from ..contract.device import Device, Hooks
    from ..memory.copies import CopyTicket
    from ..memory.views import ByteRange, Memory
    from ..slots.fields import StateConfig
    from ..streams import Event, Stream


class Outbox:
    """The sink a plugin's ``save_output`` sees: it keeps the one output, for the policy to send or not (G17)."""

    session = 0

    def __init__(self) -> None:
        self.pending: PendingOutput | None = None

    def put(self, pending: PendingOutput) -> None:
        """Keep the step's output. A second one is refused: a step has one record (G19)."""
        if self.pending is not None:
            raise PluginError("put two outputs of one step into the sink", cure="put one", hook="save_output")
        self.pending = pending

    def close(self, timeout: float) -> None:
        """Nothing to drain: the policy sends."""


class Policy:
    """What is decided on the host around the four hooks. Stateless; one object serves any number of devices."""

    def state(self, device: Device, sizes: StateConfig, name: str, beside: Sequence[str] = ()) -> SlotState:
        """A new state; where there is no room for it, the error says so of its sizes."""
        try:
            return open_states(device, sizes, name, beside)
        except OutOfMemory as error:
            raise error.located(argument="sizes") from error.__cause__
        except MemoryError as error:
            cure = "free memory, or give fewer slots or smaller sizes"
            raise OutOfMemory(f"no room for {sizes}: {error}", cure=cure, argument="sizes") from error

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Resolve the target, convert the value (G6), keep it apart from the caller's (G2), then write it."""
        view = target if type(target) is View else device.resolve(target)
        if view.memory.device is not device:
            raise InvalidValue(
                "the target is memory of another opened device", cure="write it with that device", argument="target"
            )
        if not (view._apart or view.elements_apart):  # worked out before, most often
            raise InvalidValue(
                f"elements of the target {view} share memory, so what is written depends on an order that there is not",
                cure="write to the tensor that it was expanded from, or to a contiguous one",
                argument="target",
            )
        prepared: Value
        maker = SCALAR_MAKERS.get((view.dtype, type(value)))  # most values are plain scalars: a call of Python's less
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

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Check the whole batch (G8), order it after the slots' last readers (G28), write it, then book it."""
        batch = tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks)
        _check_state(device, state)
        sound = is_sound(state.host_table, batch)
        if not sound or state.host_table.twin is None:  # which looks at the sizes too
            batch.check_sizes(state.layout)
        if not sound:
            found = problems(state.host_table, batch)
            if found:
                raise InvalidBatch(found)
        if not batch.requests:
            return DONE
        state.wait_for_readers_of_batch(batch, stream)
        beside = [(one, tasks_beside(one, batch)) for one in state.companions] if state.companions else ()
        for companion, own in beside:
            companion.wait_for_readers_of_batch(own, stream)
        ticket = _ticket(hooks.insert_tasks(device=device, state=state, tasks=batch, stream=stream))
        for companion, own in beside:
            companion.host_table.commit(own)
        state.host_table.commit(batch)
        if state.speculative:
            state.drafts.follow(batch)
        return ticket

    def broadcast_tokens(self, device: Device, hooks: Hooks, state: SlotState, group: Group, stream: Stream) -> Ticket:
        """A group of one communicates nothing (G15); otherwise a header, the plugin's one collective, and its check.

        A group that is lost, before or under way, makes the ticket raise (G16).
        """
        _check_state(device, state)
        if len(group.ranks) == 1:
            return DONE
        device.check_stream(stream)  # before it is counted: ranks tell broadcasts by their number
        channel = channel_of(state, group) or self._open_group(device, state, group)
        channel.begin(stream)
        try:
            ticket = _ticket(hooks.broadcast_tokens(device=device, state=state, group=group, stream=stream))
        except GroupLost as error:
            return channel.lost(error)
        return channel.checked(ticket, stream)

    def open_group(self, device: Device, state: SlotState, group: Group) -> None:
        """The same opening for a caller who wants it ahead of the first broadcast; once for each state and group."""
        if group.size > 1 and channel_of(state, group) is None:
            self._open_group(device, state, group)

    def _open_group(self, device: Device, state: SlotState, group: Group) -> BroadcastChannel:
        """Have all ranks of the group compare what they hold of the state, before its first broadcast (G14)."""
        _check_state(device, state)
        channel = BroadcastChannel(device, state, group, device.communicator(group))
        state.channels[group.ranks] = channel
        return channel

    def save_output(
        self, device: Device, hooks: Hooks, state: SlotState, step: Step, sink: Sink, stream: Stream
    ) -> Ticket:
        """Have the output copied, clean up after that copy on every rank (G18), then send on the first rank (G17)."""
        _check_state(device, state)
        order = _check_step(state, step)
        outbox = Outbox()
        first = step.group.is_first
        send = sink.put if first else outbox.put  # looked up before anything is done: what is no sink ends here
        try:
            ticket = _ticket(hooks.save_output(device=device, state=state, step=step, sink=outbox, stream=stream))
        finally:
            if state.host_table.preempted or state.host_table.aborted:
                device.submit(state.cleanup_plan(order), stream)
                state.host_table.reported(order.tolist())
            for companion in state.companions:  # nobody saves their output: the target's says who left
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
        except SinkClosed as error:  # not taken: the ticket leads to the tokens that nobody will be sent (G19)
            error.ticket = ticket
            outbox.pending.complete(error)
            raise
        return ticket

    def copy_out(self, device: Device, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Check that the bytes are this device's, then copy them."""
        foreign = getattr(memory, "device", None) is not device
        if foreign:
            raise InvalidValue(
                f"{memory!r} is no memory of this device", cure="give state.memory, or a view's", argument="memory"
            )
        for part in parts:
            if part.offset < 0 or part.nbytes < 0 or part.end > memory.nbytes:
                raise InvalidValue(
                    f"bytes {part.offset} to {part.end} of {memory.nbytes}",
                    cure="give ranges inside the memory",
                    argument="parts",
                )
        return device.copy_out(memory, parts, stream)

    def update_inputs(self, device: Device, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Advance the state by one step, and remember that it reads the state (G28).

        It looks at every slot, whatever the step's order names: a request that entered another one meanwhile would run.
        """
        order = check_update(device, state, step)
        ticket = device.update_inputs(state, step, stream)
        advanced(state, step, order, device.event(stream) if device.capabilities.async_h2d else None)
        return ticket

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Check that the drafts come in order and fit, and write them after the slots' last readers (G28), at once."""
        _check_state(device, state)
        _check_step(state, step)
        found = check_drafts(state, step, drafts)
        ticket: Ticket = DONE
        if found:
            state.wait_for_readers(np.array(list(found)), stream)
            ticket = _ticket(device.submit(plan_drafts(state, found), stream))
        state.drafts.handed = step.number
        state.drafts.holders = {slot: int(state.host_table.admission_ids[slot]) for slot in found}
        return ticket


def check_update(device: Device, state: SlotState, step: Step) -> Any:  # noqa: ANN401 (an int32 array)
    """The step's order for this state, which may be advanced by this step."""
    _check_state(device, state)
    order = _check_step(state, step)
    state.drafts.check_update(state.mirror, step)
    return order


def advanced(state: SlotState, step: Step, order: Any, event: Event | None) -> None:  # noqa: ANN401 (an int32 array)
    """Book that a step advances the state; ``event``: behind the work that does it, None where that is over."""
    state.updates += 1
    state.drafts.advanced(step)
    state.host_table.appended(order, state.sizes.max_accept if step.speculative else 1)
    if event is not None:
        state.add_reader(None, event)


def check_kinds(arguments: Mapping[str, object]) -> None:
    """Raise :class:`InvalidValue` for an argument of the wrong kind: asked once a call has failed, not at each call."""
    for name, given in arguments.items():
        kind, cure = _KINDS.get(name, (object, ""))
        if not isinstance(given, kind):
            raise InvalidValue(f"{given!r} is no {kind.__name__}", cure=cure, argument=name)
        if name == "tasks":
            check_tasks(given)
        if name == "sink" and _sends(arguments) and not callable(getattr(given, "put", None)):
            raise InvalidValue(
                f"{given!r} is no sink: it has no put", cure="give a MemorySink or open_sink(url)", argument=name
            )


def _sends(arguments: Mapping[str, object]) -> bool:
    """True on the rank that sends; the others need no sink."""
    step = arguments.get("step")
    return isinstance(step, Step) and step.group.is_first


def is_stream(stream: object) -> bool:
    """True for a stream in hal's words, which a device without asynchrony would take, whatever it is."""
    methods = ("record", "wait", "synchronize")
    return not isinstance(stream, type) and all(callable(getattr(stream, method, None)) for method in methods)


def no_stream(stream: object) -> InvalidValue:
    """The error for what is no stream."""
    return InvalidValue(
        f"{stream!r} is no stream",
        cure="give device.default_stream, one that device.stream() made, or a stream of a framework on this device",
        argument="stream",
    )


_KINDS: dict[str, tuple[type, str]] = {
    "state": (SlotState, "give what device.state(StateConfig(…)) returned"),
    "step": (Step, "give Step(number, {state.name: slots})"),
    "group": (Group, "give Group(ranks, rank), or ALONE"),
}


def _ticket(result: object) -> Ticket:
    """What a plugin's hook returned, which must be a ticket: None would hide a hook that did nothing."""
    if type(result) in _tickets or isinstance(result, Ticket):  # the latter is slow, asked of an abstract class
        _tickets.add(type(result))
        return result  # type: ignore[return-value]
    raise PluginError(f"the plugin's hook returned {result!r}", cure="return a Ticket, never None")


_tickets: set[type] = set()


def _check_state(device: Device, state: SlotState) -> None:
    if not isinstance(state, SlotState):
        raise InvalidValue(f"{type(state).__name__} is no SlotState", cure="make a SlotState", argument="state")
    if state.device is not device:
        raise InvalidValue("the state lives on another opened device", cure="use its own device", argument="state")
    if state.unusable:
        state.check_usable()


def _check_step(state: SlotState, step: Step) -> Any:  # noqa: ANN401 (an int32 array)
    """The step's order for this state, after checking all bounds that the host knows (G21)."""
    order = step.order(state.name)
    state.check_slots(step.spans[state.name], "step")
    if step.speculative and not state.speculative:
        raise InvalidValue(
            "a speculative step on a state without drafts", cure="give StateConfig(max_draft_tokens=…)", argument="step"
        )
    if step.logprobs is not None and not 0 <= step.logprobs <= state.sizes.max_logprobs:
        raise InvalidValue(
            f"{step.logprobs} log-probabilities, the state holds {state.sizes.max_logprobs}",
            cure="ask for less, or give StateConfig(max_logprobs=…)",
            argument="step",
        )
    return order
