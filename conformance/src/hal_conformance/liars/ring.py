"""Liars in the staging ring: fences of spans, the ends of its free room, waits of a full ring, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.devices.sync import PASSED
from hal_core.errors import OutOfMemory
from hal_core.memory.views import View

from .proxies import HELD, RING, ProxyEvent, variant
from .rows import Call, How, first, instead, noted, register, row, then

if TYPE_CHECKING:
    from hal_core.streams import Event

LARGE = 64 << 10
"""Bytes from which a span is large."""
SLACK = 256
"""Bytes by which a span may reach into the oldest one: one unit of the ring."""


class Numbered(ProxyEvent):
    """A fence that passes with the eighth span after its own."""

    def __init__(self, true: Event, ring: Any) -> None:  # noqa: ANN401 (the ring)
        super().__init__(true)
        ring.number = ring.__dict__.get("number", 0) + 1
        self.ring, self.number = ring, ring.number

    def done(self) -> bool:
        return self.ring.number - self.number >= 8 or super().done()

    def wait(self, timeout: float | None = None) -> bool:
        return self.ring.number - self.number >= 8 or super().wait(timeout)


class Forgettable(ProxyEvent):
    """A fence that may be forgotten."""

    forgotten = False

    def done(self) -> bool:
        return self.forgotten or super().done()

    def wait(self, timeout: float | None = None) -> bool:
        return self.forgotten or super().wait(timeout)


def fenced(wait: Callable[[Call, float | None], bool]) -> How:
    """Return a lie about the fence of a span: ``wait(call, timeout)`` waits for it."""
    return lambda call: call(event=variant(ProxyEvent, wait=lambda one, timeout=None: wait(call, timeout))(call.event))


def newest(call: Call) -> object:
    ring = call.me
    ring.newest = call.event
    return fenced(lambda _, timeout: ring.newest.wait(timeout))(call)


thousandth = fenced(lambda call, timeout: call.event.wait(None if timeout is None else timeout / 1000))


def neighbour(call: Call) -> object:
    before = call.me.__dict__.get("last", PASSED)
    call.me.last = call.event
    return call(event=before)


def forgettable(call: Call) -> object:
    fence = Forgettable(call.event)
    call.kept("fences", []).append(fence)
    return call(event=fence)


def wrap(call: Call) -> object:
    ring, nbytes = call.me, call.nbytes
    room = ring.limit - ring.held
    if ring.__dict__.get("end", 0) + nbytes > ring.held and room < max(nbytes, ring.held):
        for fence in ring.__dict__.pop("fences", ()):
            fence.forgotten = True
    span = call()
    ring.end = span.begin + -(-max(nbytes, 1) // 256) * 256
    return span


def free_source(call: Call) -> None:
    if call.span.nbytes >= LARGE and not call.event.done():
        call.span.buffer[...] = 0xDD


def jam(call: Call) -> object:
    jammed = call.kept("jammed", [])
    if jammed:
        raise OutOfMemory(jammed[0].what, cure=jammed[0].cure, argument="ring")
    try:
        return call()
    except OutOfMemory as error:
        jammed.append(error)
        raise


def place(wrapped: int, behind: int) -> How:
    """Return a lie about where a span is put: with so much slack at the wrap and behind the newest span."""

    def lie(call: Call) -> object:
        segment, nbytes = call.self, call.nbytes
        if not segment.entries:
            segment.head = 0
            return 0 if nbytes <= segment.size else None
        oldest = segment.entries[0][0]
        if segment.head > oldest:
            if segment.head + nbytes <= segment.size:
                return segment.head
            return 0 if nbytes <= oldest + wrapped else None
        return segment.head if segment.head + nbytes <= oldest + behind and segment.head != oldest else None

    return lie


def without_waits(call: Call) -> object:
    true = call()
    return replace(true, ring_waits=0, host_waits=true.host_waits - true.ring_waits)


def in_pieces(call: Call) -> object:
    target, value = call.target, call.value
    shape, _, run = target.collapsed()
    count = 4096 // target.dtype.itemsize
    if shape or run <= 4096 or not isinstance(value, np.ndarray):
        return call()
    flat = value.reshape(-1)
    for at in range(0, target.size, count):
        some, begin = flat[at : at + count], target.offset + at * target.dtype.itemsize
        ticket = call(target=View.contiguous(target.memory, begin, some.shape, target.dtype, target.owner), value=some)
    return ticket


def wait_until_idle(call: Call) -> None:
    ring, value = call.device.staging, call.value
    if isinstance(value, np.ndarray) and value.nbytes > ring.limit and not call.stream.record().wait(ring.deadline):
        raise OutOfMemory("the stream is busy", cure="let it go on", argument="ring")


TABLE = {
    "a span is fenced by the event of the span before it": row(
        "NeighboursFence", 2, "staging.fence", neighbour, RING
    ),  # an off-by-one in the table of events
    "spans are fenced by events of the default stream, whatever stream reads them": row(
        "FenceOfTheDefaultStream",
        2,
        "staging.fence",
        lambda call: call(event=call.me.device.default_stream.record()),
        RING,
    ),  # right as long as there is only one stream
    "a span is reused after eight other ones: depth is the guard": row(
        "DepthIsTheGuard",
        2,
        "staging.fence",
        lambda call: call(event=Numbered(call.event, call.me)),
        RING,
        "vLLM 24527, 25279, 28706",
    ),  # a limit of eight steps in flight, taken for granted
    "at the end of the ring the next span begins at its start, without checking the spans there": row(
        "WrapsWithoutLooking", 2, "staging.fence", forgettable, RING, also={"staging.take": wrap}
    ),  # a comparison of head and tail that ignores the wrap
    "the ring wraps into its oldest span by a few bytes": row(
        "WrapsIntoTheOldest", 2, "place of a span", place(SLACK, 0), RING
    ),  # an off-by-one in the comparison at the wrap
    "a span behind the newest reaches into the oldest by a few bytes": row(
        "RunsIntoTheOldest", 2, "place of a span", place(0, SLACK), RING
    ),  # the same, once the ring has wrapped
    "the source of a large upload is freed when the call returns": row(
        "LargeSourceFreed", 2, "staging.fence", then(free_source), RING, "Paddle: sources not kept alive"
    ),  # a large block outside the pool, without a fence
    "a full ring waits for its newest entry, not for the oldest": row(
        "NewestIsWaitedFor", 3, "staging.fence", newest, RING, also={"staging.take": Call.__call__}
    ),  # a wait for work that was queued on another stream much later; it polls, so the kit must see where it is made
    "the deadline of a full ring is taken for milliseconds": row(
        "DeadlineInMilliseconds", 3, "staging.fence", thousandth, RING
    ),  # an error after a thousandth of the deadline
    "a ring that was full once refuses everything from then on": row(
        "JammedAfterRefusal", 3, "staging.take", jam, RING
    ),  # an error state that is never left
    "when a full ring meets its deadline, its fences are dropped": row(
        "DropsFencesAtTheDeadline",
        3,
        "staging._await",
        noted(OutOfMemory, lambda call, _: call.segment.entries.clear()),
        (*RING, "primitives"),
    ),  # "the device has stopped"; the next write takes spans that are still to be read
    "waits for a full ring are not counted": row("RingWaitsUncounted", 3, "counters", without_waits, RING),
    "a value goes in pieces, and those before the refused one are queued": row(
        "PiecesHalfQueued", 3, "async_set_value", in_pieces, RING
    ),  # pieces that take spans one by one
    "a value above the ring waits until its stream is idle": row(
        "LargeValuesWaitForTheirStream", 3, "async_set_value", first(wait_until_idle), (*RING, "fused_scatter")
    ),  # pieces that go through the ring in the stream's own order
    "a value above the limit does not wait for its stream": row(
        "LimitOfValuesIsIgnored", 3, "wait_for_queued_work", lambda call: call.me.count("host_waits"), HELD
    ),  # it takes as much device memory as it needs, however long its stream is held
    "a value above the limit waits for the default stream": row(
        "LimitAsksDefaultStream",
        3,
        "wait_for_queued_work",
        lambda call: call(stream=call.me.own_stream(call.me.default_stream)),
        (*RING, "primitives"),
    ),  # a held stream beside it takes any amount
    "no room in the staging ring is a bare MemoryError": row(
        "OutOfMemoryIsBare", 26, "async_set_value", instead(OutOfMemory, lambda error: MemoryError(error.what)), RING
    ),  # the allocator's own error, without the contract's class, device and cure
}
register(__name__, TABLE)
