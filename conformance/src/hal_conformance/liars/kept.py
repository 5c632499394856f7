"""Liars about what is kept too short, or for another: drafts, events, values on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.memory.plan import WritePlan
from hal_core.memory.views import View
from hal_core.runtime.policy import Policy
from hal_core.slots.drafts import check_drafts
from hal_core.tickets import DONE, Ticket

from . import Lie, Patch, liar
from .tickets import HELD, Wrapped

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.memory.values import Value
    from hal_core.memory.writes import Writes
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.slots.tasks import Task, TaskBatch
    from hal_core.streams import Stream

BESIDE = (*HELD, "async_d2h")
"""Streams, and copies that show the order of the work on them."""


class OtherDrafts(Policy):
    """Base of policies whose ``set_drafts`` sees another stream or forgets what failed."""


@liar(28, "drafts on another stream do not wait for their step", requires=(*HELD, "overlapped_update"))
class DraftsBesideTheirStep(OtherDrafts):
    """A proposer with a stream of its own."""

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Forget the step's readers."""
        kept, state._readers = state._readers, []
        try:
            return super().set_drafts(device, state, step, drafts, stream)
        finally:
            state._readers = kept


@liar(12, "drafts that the driver refused count as handed over")
class RefusedDraftsAreBooked(OtherDrafts):
    """Booked before they are written."""

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Book first."""
        try:
            return super().set_drafts(device, state, step, drafts, stream)
        except RuntimeError:
            state.drafts.handed = step.number
            raise


@liar(12, "slots keep that they hold drafts which the driver refused")
class RefusedDraftsAreHeld(OtherDrafts):
    """The same of the other half of the book."""

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Hold first."""
        try:
            return super().set_drafts(device, state, step, drafts, stream)
        except RuntimeError:
            state.drafts.holders = {slot: int(state.host_table.admission_ids[slot]) for slot in (0, 1)}
            raise


@liar(4, "drafts are written on the default stream instead of the one given", requires=BESIDE)
class DraftsOnTheDefaultStream(OtherDrafts):
    """A proposer's stream is not passed on."""

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Write on the other stream."""
        return super().set_drafts(device, state, step, drafts, device.default_stream)


@liar(4, "drafts are written on a stream of their own", requires=BESIDE)
class DraftsOnTheirOwnStream(OtherDrafts):
    """The stream given waits for it, but it waits for none."""

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Write beside the stream."""
        own = device.stream()
        ticket = super().set_drafts(device, state, step, drafts, own)
        stream.wait(own.record())
        return ticket


class InPieces(OtherDrafts):
    """Base: drafts are written as several plans."""

    def set_drafts(self, device: Device, state: SlotState, step: Step, drafts: object, stream: Stream) -> Ticket:
        """Submit each piece by itself."""
        found, submit = check_drafts(state, step, drafts), device.submit

        def pieces(plan: WritePlan, on: Stream) -> Ticket:
            flat, ticket = plan.flat(), submit(plan, on)
            for row in self.chosen(flat, len(found)):
                ticket = submit(WritePlan(flat.memory, flat.writes[row : row + 1], [flat.payload]), on)
            return ticket

        own: Any = device
        own.submit = pieces
        try:
            return super().set_drafts(device, state, step, drafts, stream)
        finally:
            del own.submit

    def chosen(self, plan: WritePlan, slots: int) -> Sequence[int]:
        """Return the writes that are submitted apart."""
        raise NotImplementedError


@liar(10, "drafts are a submission for each slot", requires="fused_scatter")
class DraftsApart(InPieces):
    """A loop over the slots."""

    def chosen(self, plan: WritePlan, slots: int) -> Sequence[int]:
        """One of each slot's."""
        return range(slots)


@liar(10, "drafts are a submission for each field", requires="fused_scatter")
class DraftsByField(InPieces):
    """A copy for the tokens, one for their number, one for the step's inputs."""

    def chosen(self, plan: WritePlan, slots: int) -> Sequence[int]:
        """Two more."""
        return range(min(2, len(plan.writes)))


@liar(28, "a write to several memories does not wait for a step", requires=(*HELD, "overlapped_update"))
class WritesBesideTheirStep(Policy):
    """It knows memories, and no state."""

    def write(self, device: Device, writes: Writes, stream: Stream) -> Ticket:
        """Forget the owners."""
        owners, writes.owners = writes.owners, {}
        try:
            return super().write(device, writes, stream)
        finally:
            writes.owners = owners


@liar(1, "a write to several memories is put on the default stream instead of the one given", requires=BESIDE)
class WritesOfSeveralOnTheDefaultStream(Policy):
    """A call without a stream argument."""

    def write(self, device: Device, writes: Writes, stream: Stream) -> Ticket:
        """Write on the other stream."""
        return super().write(device, writes, device.default_stream)


@liar(12, "a released slot counts as one with drafts")
class ReleasedSlotsKeepDrafts(Patch):
    """The book of drafts is another than that of slots."""

    seam = "release of slots"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Put the drafts back."""

        def release(state: SlotState, slots: Any) -> None:  # noqa: ANN401 (the core's)
            held = dict(state.drafts.holders)
            true(state, slots)
            state.drafts.holders.update(held)

        return release


@liar(12, "a slot that a request has left counts as one with drafts")
class LeftSlotsKeepDrafts(Policy):
    """The same of requests that leave."""

    def insert_tasks(
        self, device: Device, hooks: Hooks, state: SlotState, tasks: TaskBatch | Sequence[Task], stream: Stream
    ) -> Ticket:
        """Put the drafts back."""
        held = dict(state.drafts.holders)
        ticket = super().insert_tasks(device, hooks, state, tasks, stream)
        state.drafts.holders.update(held)
        return ticket


class OfARing(Wrapped):
    """A ticket that asks a place of a ring of events, which later tickets use again."""

    __slots__ = ("_place", "_ring")

    def at(self, ring: list[Ticket], place: int) -> OfARing:
        """The same, of a place."""
        self._ring, self._place = ring, place
        return self

    def done(self) -> bool:
        return self._waited or self._ring[self._place].done()


class EventsInARing(Lie):
    """Base: the tickets of values share ``size`` events."""

    size = 0

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Take the next place."""
        return self.placed(super().async_set_value(device, target, value, stream), stream)  # type: ignore[misc]

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """The same of plans."""
        return self.placed(super().submit(plan, stream), stream)  # type: ignore[misc]

    def placed(self, ticket: Ticket, stream: Stream) -> Ticket:
        """A ticket of the ring."""
        ring: list[Ticket] = self.__dict__.setdefault("ring", [])
        place = self.__dict__["next_place"] = (self.__dict__.get("next_place", -1) + 1) % self.size
        if place < len(ring):
            ring[place] = ticket
        else:
            ring.append(ticket)
        return OfARing(ticket, stream).at(ring, place)


@liar(3, "the events of tickets are used again after 256 calls", requires=HELD)
class EventsUsedAgain(EventsInARing):
    """A fixed pool."""

    size = 256


@liar(3, "the events of tickets are used again after 1,024 calls", requires=HELD)
class ManyEventsUsedAgain(EventsInARing):
    """A larger one."""

    size = 1024


@liar(5, "a value on the device that is expanded is read as if it lay together")
class ExpandedAsContiguous(Lie):
    """Strides of 0 are taken for none."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Read on behind its first element, as far as the memory goes."""
        if isinstance(value, View) and 0 in value.strides:
            end = value.offset + value.size * value.dtype.itemsize
            if end <= value.memory.nbytes:
                value = View.contiguous(value.memory, value.offset, value.shape, value.dtype)
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


@liar(5, "a value that overlaps its target is copied in two pieces")
class OverlapsInPieces(Lie):
    """The second piece is read when the first is written."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Half of the first axis, then the other half."""
        write: Any = super().async_set_value  # type: ignore[misc]
        if isinstance(value, View) and target.shape == value.shape and target.shape and target.shape[0] > 1:
            half = target.shape[0] // 2
            write(device, target[:half], value[:half], stream)
            target, value = target[half:], value[half:]
        return write(device, target, value, stream)  # type: ignore[no-any-return]


# -- values that are there already, or were ----------------------------------------------------------------------------


class EqualSkipped(Lie):
    """Base: a scalar that equals the last one written to its place is not written again."""

    @property
    def known(self) -> dict[tuple[int, int, int], bytes]:
        """The last scalar of each place: the memory's number, first and last byte."""
        found: dict[tuple[int, int, int], bytes] = self.__dict__.setdefault("_known", {})
        return found

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Skip it, or note it; a write forgets what it overlaps."""
        key, scalar = (id(target.memory), *target.bounds()), isinstance(value, np.generic) and value.tobytes()
        if scalar and self.known.get(key) == scalar:
            return DONE
        overlapping = [one for one in self.known if one[0] == key[0] and one[1] < key[2] and key[1] < one[2]]
        ticket: Ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        for one in overlapping:
            self.known.pop(one, None)
        if scalar:
            self.known[key] = scalar
            self.__dict__.setdefault("_memories", []).append(target.memory)  # its number stays its own
        return ticket


@liar(4, "a scalar equal to the last one written there is left out, although a step has changed the place")
class EqualToBeforeTheStep(EqualSkipped):
    """Plans make it forget, kernels do not."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Forget."""
        self.known.clear()
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]


@liar(4, "a scalar equal to the last one written there is left out, although a plan has changed the place")
class EqualToBeforeThePlan(EqualSkipped):
    """Kernels make it forget, plans do not."""

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Forget."""
        self.known.clear()
        return super().update_inputs(state, step, stream)  # type: ignore[misc,no-any-return]
