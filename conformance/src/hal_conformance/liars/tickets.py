"""Liars whose tickets answer for something else than their work, or lose its error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hal_core.devices.tickets import AsyncTicket
from hal_core.errors import TicketTimeout
from hal_core.memory.copies import Bytes
from hal_core.streams import Stream
from hal_core.tickets import DONE, Mode, PromiseTicket, Ticket

from .proxies import BELOW, HELD, HELD_COPIES, EventTicket, Proxy, given, variant
from .rows import Call, How, first, register, row, then

WRITES = "submit async_set_value"
"""Where a device makes the tickets of writes."""

# -- tickets of copies, and of writes ----------------------------------------------------------------------------------


Done = variant(Proxy, done=lambda one: True, _block=lambda one, timeout: True)
Quiet = variant(Proxy, _block=lambda one, timeout: Proxy._block(one, timeout) or True)
Milliseconds = variant(
    Proxy, _block=lambda one, timeout: Proxy._block(one, None if timeout is None else timeout / 1000)
)
ZeroIsNone = variant(Proxy, _block=lambda one, timeout: Proxy._block(one, timeout or None))


class OneWaiter(Proxy):
    """A wait returns at once if another thread is waiting."""

    __slots__ = ("waiting",)

    def __init__(self, inner: Ticket, nbytes: Sequence[int] = ()) -> None:
        super().__init__(inner, nbytes)
        self.waiting = threading.Lock()

    def _block(self, timeout: float | None) -> bool:
        if not self.waiting.acquire(blocking=False):
            return True
        try:
            return super()._block(timeout)
        finally:
            self.waiting.release()


class Begun(Proxy):
    """A copy, and the event before it; its data is the host block as it is now."""

    __slots__ = ("begun",)
    begun: Any

    @property
    def data(self) -> Sequence[Bytes]:
        arrived: Any = self.inner
        return arrived.data  # type: ignore[no-any-return]


DoneOnceBegun = variant(Begun, done=lambda one: one.begun.done())
EndedOnceBegun = variant(Begun, done=lambda one: one.begun.passed, _block=lambda one, timeout: one.begun.wait(timeout))


class Wrapped(Ticket):
    """A ticket around another one: done once a wait has ended."""

    __slots__ = ("_inner", "_stream", "_waited")
    mode: Mode = "async"

    def __init__(self, inner: Ticket, stream: Stream) -> None:
        super().__init__()
        self._inner, self._stream, self._waited = inner, stream, False

    def done(self) -> bool:
        return self._waited

    def _block(self, timeout: float | None) -> bool:
        self._waited = self._inner._block(timeout)
        return self._waited

    def failure(self) -> BaseException | None:
        return self._inner.failure()


OfTheStream = variant(Wrapped, done=lambda one: one._waited or one._stream.record().done())


class OfARing(Wrapped):
    """A ticket that asks a place of a ring of events, which later tickets use again."""

    __slots__ = ("_place", "_ring")

    def at(self, ring: list[Ticket], place: int) -> OfARing:
        """The same, of a place."""
        self._ring, self._place = ring, place
        return self

    def done(self) -> bool:
        return self._waited or self._ring[self._place].done()


def copy_of(proxy: type[Proxy]) -> How:
    """Return a lie whose tickets of copies are proxies."""
    return lambda call: proxy(call(), [part.nbytes for part in call.parts])


def writes_of(proxy: type[Proxy]) -> dict[str, How]:
    """Return lies whose tickets of writes are proxies."""

    def lie(call: Call) -> object:
        ticket = call()
        return ticket if ticket is DONE else proxy(ticket)

    return dict.fromkeys(WRITES.split(), lie)


def begun(proxy: type[Begun]) -> How:
    """Return a lie whose copies know the event before them."""

    def lie(call: Call) -> object:
        before = call.me.own_stream(call.stream).record()
        front = proxy(call(), [part.nbytes for part in call.parts])
        front.begun = before
        return front

    return lie


def in_a_ring(size: int) -> How:
    """Return a lie whose tickets share ``size`` events."""

    def lie(call: Call) -> object:
        ticket, ring = call(), call.kept("ring", [])
        place = call.me.__dict__["next_place"] = (call.me.__dict__.get("next_place", -1) + 1) % size
        if place < len(ring):
            ring[place] = ticket
        else:
            ring.append(ticket)
        return OfARing(ticket, call.stream).at(ring, place)

    return lie


def settled(error: BaseException | None = None) -> Ticket:
    """Return a ticket with mode "async" of finished work."""
    ticket = PromiseTicket("async")
    ticket.complete(error)
    return ticket


def called_sync(call: Call) -> object:
    ticket = Proxy(call())
    ticket.mode = "sync"
    return ticket


def warn(call: Call) -> None:
    reason = call.device.capabilities.fallbacks.get("async_set_value", "")
    logging.getLogger("hal").warning("%s works with fallbacks: async_set_value: %s", call.device.name, reason)


def elsewhere(call: Call) -> object:
    call()
    return EventTicket(call.device.default_stream.record())


def dropped(call: Call) -> object:
    call()
    return DONE


def late_write(call: Call) -> object:
    earlier = call.me.__dict__.get("waiting")
    call.me.__dict__["waiting"] = call
    return earlier() if earlier else DONE


DRIVEN = (*HELD_COPIES, "primitives")
TICKETS = {
    "a copy out says done while the stream it follows is held": row(
        "CopyDoneEarly", 1, "copy_out", copy_of(Done), HELD_COPIES, "FastDeploy 7221"
    ),  # a query of the copy engine, which has no work yet
    "the wait for a copy returns after its time-out as if the copy were there": row(
        "TimeoutReturnsQuietly", 1, "copy_out", copy_of(Quiet), HELD_COPIES
    ),  # an unchecked result of the driver's wait
    "time-outs of tickets are taken for milliseconds": row(
        "TimeoutsInMilliseconds", 1, "copy_out", copy_of(Milliseconds), HELD_COPIES, also=writes_of(Milliseconds)
    ),  # a driver call whose timeout is in milliseconds
    "wait(0) waits for ever": row(
        "ZeroMeansForEver", 1, "copy_out", copy_of(ZeroIsNone), HELD_COPIES, also=writes_of(ZeroIsNone)
    ),  # ``if timeout:`` instead of ``if timeout is not None:``
    "a thread that waits while another does is told done at once": row(
        "SecondWaiterIsToldDone", 1, "copy_out", copy_of(OneWaiter), HELD_COPIES, also=writes_of(OneWaiter)
    ),  # a wait that returns at once if another thread is waiting
    "a query counts a running copy as done": row(
        "RunningCountsAsDone", 1, "copy_out", begun(DoneOnceBegun), DRIVEN
    ),  # ``status <= CL_RUNNING``, or a query that is not zero
    "a wait for a copy ends when the copy begins": row(
        "WaitEndsAtTheBeginning", 1, "copy_out", begun(EndedOnceBegun), DRIVEN
    ),  # a wait for the wrong event of the two that a copy has
    "a ticket is done only once somebody has waited for it": row(
        "DoneOnceWaited", 3, WRITES, lambda call: Wrapped(call(), call.stream), HELD
    ),  # only a wait queries the driver
    "a ticket asks its stream, which has later work": row(
        "DoneWithItsStream",
        3,
        WRITES,
        lambda call: OfTheStream(call(), call.stream),
        HELD,
        "torch openreg: stream query",
    ),  # a query of the queue in place of one of the event
    "the events of tickets are used again after 256 calls": row("EventsUsedAgain", 3, WRITES, in_a_ring(256), HELD),
    "the events of tickets are used again after 1,024 calls": row(
        "ManyEventsUsedAgain", 3, WRITES, in_a_ring(1024), HELD
    ),
    "a ticket is done while its work still runs": row(
        "DoneEarly", 3, "submit", dropped, HELD, "torch openreg: stream query"
    ),  # a ticket of the queue, not of the work
    "a write is only carried out by the next write": row(
        "WritesLate", 1, "async_set_value", late_write
    ),  # a queue that is never flushed
    "the ticket of a write asks the default stream instead of the one given": row(
        "TicketsOfTheDefaultStream", 1, "async_set_value", elsewhere, HELD
    ),  # work on the right stream, its event on another
    "an asynchronous copy waits for the stream before it returns": row(
        "WaitsInside", 3, WRITES, then(lambda call: call.stream.synchronize()), HELD, "Paddle 78162"
    ),  # a hidden synchronisation
    "a synchronous device's tickets have the mode async": row(
        "SyncCalledAsync", 7, "async_set_value", lambda call: (call(), settled())[1], "not async_h2d"
    ),  # a mode by class, not by work
    "an asynchronous device's tickets have the mode sync": row(
        "AsyncCalledSync", 7, "async_set_value", called_sync, HELD
    ),  # a mode copied as a constant from another plugin
    "a fallback is logged at every call": row(
        "LogsEveryCall", 7, "async_set_value", first(warn), "not async_h2d"
    ),  # a warning in the hot path
}
register(__name__, TICKETS)

# -- faults that a ticket raises too seldom, too late or not at all ----------------------------------------------------


def seen_after_a_timeout(ticket: AsyncTicket, timeout: float | None = None) -> None:
    try:
        AsyncTicket.wait(ticket, timeout)
    except TicketTimeout:
        ticket.observed = True
        raise


def looked_at(ticket: Any) -> BaseException | None:  # noqa: ANN401 (an asynchronous ticket)
    found = AsyncTicket.failure(ticket)
    ticket._looked = True
    return found


def wait_once(ticket: Ticket, timeout: float | None = None) -> None:
    if not ticket.observed:
        Ticket.wait(ticket, timeout)


def failing(**methods: Any) -> How:  # noqa: ANN401 (methods, or attributes)
    """Return a lie whose tickets of writes and steps have other methods."""
    return lambda call: setattr(call.me, "ticket_type", variant(AsyncTicket, **methods))


def observed(call: Call) -> object:
    ticket = call()
    ticket.observed = True
    return ticket


def untracked(hook: str) -> Callable[[Call], object]:
    """Return a lie that does not keep the tickets of one call for whoever does not wait."""
    return lambda call: None if call.hook == hook else call()


TRACKING = "tracking of a ticket"
FAULTS = {
    "a fault is raised by the first wait for its ticket, and by no later one": row(
        "FaultOfTheFirstWait", 26, "laid", failing(wait=wait_once), BELOW
    ),
    "a fault of work that nobody waits for is raised by nothing": row(
        "FaultOfNobody", 26, "laid", failing(watched=False), BELOW
    ),
    "a ticket whose work failed is never done": row(
        "FailedIsPending", 26, "laid", failing(done=lambda one: one._error is None and AsyncTicket.done(one)), BELOW
    ),
    "a ticket whose wait has timed out counts as seen: its later fault is raised by no call": row(
        "FaultAfterATimeout", 26, "laid", failing(wait=seen_after_a_timeout), BELOW
    ),
    "a ticket that was looked at while its work was pending never fails": row(
        "FaultAfterALook", 26, "laid", failing(failure=looked_at), BELOW
    ),
    "an error of drafts that nobody waits for is raised by nothing": row(
        "UntrackedDrafts", 26, TRACKING, untracked("set_drafts")
    ),  # it is no hook
    "an error of a write to several memories that nobody waits for is raised by nothing": row(
        "UntrackedWrites", 26, TRACKING, untracked("write"), BELOW
    ),  # nor is this
    "the error for values out of bounds is raised only by the first wait": row(
        "FailureToldOnce", 21, "policy.save_output", lambda call: given(call(), "wait", wait_once)
    ),  # an error that is removed from the ticket when it is raised
    "an error for values out of bounds counts as observed, though its ticket was never waited for": row(
        "UnseenCountsAsSeen", 26, "policy.save_output", observed
    ),  # a next call that does not raise the last one's error
}
register(__name__, FAULTS)
