"""Proofs that liars about the staging ring and about streams lie."""

import threading
import time

import numpy as np
import pytest
from hal_core.errors import OutOfMemory, TicketTimeout
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    POISON,
    RING,
    copied,
    ends,
    fill,
    flat,
    insert,
    lies,
    poisoned,
    prefill,
    pressed,
    proof,
    queued,
    raises,
    raw,
    state_of,
    step_of,
    update,
    write,
)

# -- the ring -------------------------------------------------------------------------------------------------------


@proof("NeighboursFence", pressed(), "fhffffff")
@proof("FenceOfTheDefaultStream", pressed(), "fhffffff")
@proof("DepthIsTheGuard", pressed(), "h" * 20, RING // 16)
@proof("WrapsWithoutLooking", pressed(), "hhhhhh")
@proof("LargeSourceFreed", pressed(), "h", 64 << 10)
def held_source_kept(bound, plan, nbytes=RING // 4):
    """Write ``nbytes`` each, "h" on a held stream and "f" on a free one, until the ring refuses; accepted writes on the
    held stream must be visible once it is released.
    """
    free, held = bound.default_stream, bound.device.stream()
    memory, taken = poisoned(bound, nbytes * len(plan)), []
    with bound.device.hold_stream(held):
        for number, where in enumerate(plan):
            value = np.full(nbytes, number + 1, np.uint8)
            try:
                write(bound, flat(memory, number * nbytes, nbytes), value, held if where == "h" else free)
            except OutOfMemory:
                break
            taken.append(number)
            free.synchronize(PATIENCE)
    held.synchronize(PATIENCE)
    return all((raw(memory)[at * nbytes : (at + 1) * nbytes] == at + 1).all() for at in taken)


def refused_unless_let_go(bound, holds, let_go):
    """Whether a write that finds the ring full is refused, while ``let_go`` of the held streams runs meanwhile."""
    before, met = bound.counters().ring_waits, []

    def act():
        met.append(raises(OutOfMemory, lambda: fill(bound, bound.default_stream, count=1)))

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    while thread.is_alive() and bound.counters().ring_waits == before:  # until the write has begun to wait
        thread.join(0.01)
    if lies(bound):
        thread.join(A_WHILE)
    holds[let_go].__exit__(None, None, None)
    thread.join(PATIENCE)
    return met[0]


@proof("NewestIsWaitedFor", pressed())
def _(bound):
    oldest, newest = bound.device.stream(), bound.device.stream()
    bound.device.staging.deadline = A_WHILE if lies(bound) else PATIENCE
    holds = [bound.device.hold_stream(stream) for stream in (oldest, newest)]
    for hold in holds:
        hold.__enter__()
    fill(bound, oldest, count=2)
    fill(bound, newest, count=2)
    refused = refused_unless_let_go(bound, holds, 0)
    holds[1].__exit__(None, None, None)
    return not refused


@proof("DeadlineInMilliseconds", pressed(deadline=PATIENCE))
def _(bound):
    hold = bound.device.hold_stream(bound.default_stream)
    hold.__enter__()
    fill(bound, bound.default_stream)
    return not refused_unless_let_go(bound, [hold], 0)


@proof("JammedAfterRefusal", pressed())
def _(bound):
    stream = bound.default_stream
    with bound.device.hold_stream(stream):
        fill(bound, stream)
        assert raises(OutOfMemory, lambda: fill(bound, stream, count=1))
    stream.synchronize(PATIENCE)
    return not raises(OutOfMemory, lambda: fill(bound, stream, count=1))


@proof("RingWaitsUncounted", pressed())
def _(bound):
    with bound.device.hold_stream(bound.default_stream):
        fill(bound, bound.default_stream)
        assert raises(OutOfMemory, lambda: fill(bound, bound.default_stream, count=1))
    return bound.counters().ring_waits > 0


@proof("PiecesHalfQueued", pressed())
def _(bound):
    stream, memory = bound.default_stream, poisoned(bound, 12 << 10)
    with bound.device.hold_stream(stream):
        fill(bound, stream, RING - (8 << 10), 1)
        value = np.ones(12 << 10, np.uint8)
        assert raises(OutOfMemory, lambda: write(bound, flat(memory, 0, 12 << 10), value))
    stream.synchronize(PATIENCE)
    return (raw(memory) == POISON).all()


def accelerated():
    """The simulated accelerator, whose plans are one launch each, with a small ring."""
    return pytest.importorskip("hal_sim").SimPlugin.open(0, {"ring_limit": RING, "deadline": 0.5})


@proof("LargeValuesWaitForTheirStream", accelerated)
def _(bound):
    memory, value = bound.device.allocate(2 * RING), np.ones(2 * RING, np.uint8)
    with bound.device.hold_stream(bound.default_stream):
        return not raises(OutOfMemory, lambda: write(bound, flat(memory, 0, 2 * RING), value))


# -- streams --------------------------------------------------------------------------------------------------------


def seen_on(bound, act, memory, stream):
    """Return the copy of ``memory`` on ``stream`` after ``act``, while the default stream is held."""
    with bound.device.hold_stream(bound.default_stream):
        act()
        ticket = copied(bound, memory, [(0, memory.nbytes)], stream)
        ticket.wait(PATIENCE)
        return np.array(ticket.data[0])


@proof("WritesOnTheDefaultStream", queued)
def _(bound):
    memory, stream = poisoned(bound, 64), bound.device.stream()
    seen = seen_on(bound, lambda: write(bound, flat(memory, 0, 64), 1, stream), memory, stream)
    return (seen == 1).all()


@proof("InsertsOnTheDefaultStream", queued)
def _(bound):
    state, stream = state_of(bound, 1), bound.device.stream()
    task, before = prefill(state, 0), raw(state.memory).copy()
    bound.device.default_stream.synchronize(PATIENCE)

    def act():
        bound.insert_tasks(state=state, tasks=[task], stream=stream)

    return (seen_on(bound, act, state.memory, stream) != before).any()


@proof("AdvancesOnTheDefaultStream", queued)
def _(bound):
    state, stream = state_of(bound, 1), bound.device.stream()
    insert(bound, state, [prefill(state, 0)])
    before = raw(state.memory).copy()

    def act():
        update(bound, state, step_of(state, 1, [0]), stream)

    return (seen_on(bound, act, state.memory, stream) != before).any()


@proof("CopiesOfTheDefaultStream", queued)
def _(bound):
    memory, stream = poisoned(bound, 64), bound.device.stream()
    with bound.device.hold_stream(stream):
        write(bound, flat(memory, 0, 64), 1, stream)
        ticket = copied(bound, memory, [(0, 64)], stream)
        return raises(TicketTimeout, lambda: ticket.wait(PATIENCE if lies(bound) else A_WHILE))


@proof("EventsOfTheDefaultStream", queued)
def _(bound):
    stream = bound.device.stream()
    with bound.device.hold_stream(stream):
        event = bound.device.event(stream)
        bound.default_stream.synchronize(PATIENCE)
        return not event.done()


def seconds_held(bound):
    """The device's seconds between two events, between which a stream was held for longer than the host takes to record
    them."""
    stream = bound.device.stream()
    first = bound.timed_event(stream=stream)
    assert first.wait(PATIENCE)
    with bound.device.hold_stream(stream):
        write(bound, flat(bound.device.allocate(64), 0, 64), 1, stream)
        second = bound.timed_event(stream=stream)
        recorded = time.monotonic()
        assert not second.wait(A_WHILE)
        held = time.monotonic() - recorded
    assert second.wait(PATIENCE)
    return held, second.seconds_since(first)


@proof("TimesOfTheHost", accelerated)
def _(bound):
    held, seconds = seconds_held(bound)
    return seconds >= held / 2


@proof("MillisecondsAsSeconds", accelerated)
def _(bound):
    held, seconds = seconds_held(bound)
    return seconds < 100 * held


@proof("TicketsOfTheDefaultStream", queued)
def _(bound):
    memory, stream = poisoned(bound, 64), bound.device.stream()
    with bound.device.hold_stream(stream):
        ticket = write(bound, flat(memory, 0, 64), 1, stream)
        bound.default_stream.synchronize(PATIENCE)
        return not ticket.done()


@proof("WaitBlocksTheHost", queued)
def _(bound):
    stream, other = bound.device.stream(), bound.default_stream
    with bound.device.hold_stream(stream):
        event = stream.record()
        return ends(lambda: other.wait(event), A_WHILE if lies(bound) else PATIENCE)


@proof("DeviceValueOnAnotherStream", queued)
def _(bound):
    memory, stream = poisoned(bound, 128), bound.default_stream
    with bound.device.hold_stream(stream):
        write(bound, flat(memory, 0, 64), 1)
        ticket = write(bound, flat(memory, 64, 64), flat(memory, 0, 64))
        if beside := bound.device.__dict__.get("beside"):
            beside.synchronize(PATIENCE)
    ticket.wait(PATIENCE)
    stream.synchronize(PATIENCE)
    return (raw(memory) == 1).all()
