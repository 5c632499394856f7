"""Functions that the ranks run in tests of groups; a task names this file and the function."""

import sys
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from hal_core.errors import HalError
from hal_core.group import Group
from hal_core.runtime.bound import bind
from hal_core.slots.fields import StateConfig
from hal_sim import SimPlugin

BOTH = (0, 1)


def failing(call):
    """Return the error's class and text, or None."""
    try:
        call()
    except HalError as error:
        return type(error).__name__, str(error)
    return None


def opened(**options):
    return bind(SimPlugin.open(0, {"collective_timeout_ms": 2000, **options}))


def content(state):
    return np.frombuffer(state.device.accelerator.peek(state.memory.address, state.layout.nbytes), np.uint8)


def agree(rank, mode, sizes, calls, ranks=BOTH):
    """Broadcast a scribbled state some times; return the wrong bytes, collectives a call, and checker findings."""
    group, wrong, counts = Group(ranks, rank.rank), [], []
    with opened(mode=mode, staged=0) as device:
        state = device.state(sizes)
        part, accelerator = state.broadcast_range(), device.device.accelerator
        for call in range(calls):
            device.default_stream.synchronize()
            mine = np.random.default_rng([call, rank.rank]).integers(0, 256, state.layout.nbytes, np.uint8)
            theirs = np.random.default_rng([call, group.source]).integers(0, 256, state.layout.nbytes, np.uint8)
            accelerator.poke(state.memory.address, mine.tobytes())
            before = device.counters()
            with device.device.hold_stream(device.default_stream):
                device.open_group(state=state, group=group)
                ticket = device.broadcast_tokens(state=state, group=group, stream=device.default_stream)
                if ticket.done():
                    wrong.append(f"call {call}: done while the stream is held")
            ticket.wait(10)
            counts.append((device.counters() - before).collectives)
            should = mine.copy()
            should[part.offset + 64 : part.end] = theirs[part.offset + 64 : part.end]
            got = content(state)
            outside = np.r_[0 : part.offset, part.offset + 64 : state.layout.nbytes]
            if (got[outside] != should[outside]).any():
                wrong.append(f"call {call}: other bytes than the source's")
        accelerator.synchronize()
        return wrong, counts, [str(race) for race in device.device.races()], "paddle" in sys.modules


def close_under_way(rank, mode, folder):
    """Rank 1 closes its device while its broadcast waits for rank 0's, which comes after that.

    Return the error of closing, the ticket's error then, and whether it was done before.
    """
    group, path = Group(BOTH, rank.rank), Path(folder, "closes")
    device = opened(mode=mode)
    state = device.state(StateConfig(num_slots=4, max_model_len=16))
    device.open_group(state=state, group=group)
    if rank.rank == 0:
        while not path.exists():
            sleep(0.01)
    ticket = device.broadcast_tokens(state=state, group=group, stream=device.default_stream)
    early = ticket.done()
    if rank.rank == 0:
        ticket.wait(20)
    path.touch()
    error = failing(device.close)
    return error, failing(ticket.wait), early


def write_on_its_own_stream(device, state):
    """A write on a separate stream: it needs no group."""
    stream = device.device.stream()
    device.async_set_value(target=state.view("seed"), value=7, stream=stream).wait(20)


def go_on(rank, most):
    """Broadcast until the group is lost; return the error, the duration of its call, a later call's error and duration,
    and the error of a write.
    """
    group = Group(BOTH, rank.rank)
    with opened() as device:
        stream = device.default_stream
        state, other = (device.state(StateConfig(num_slots=4, max_model_len=16), name=name) for name in ("a", "b"))
        end = monotonic() + most
        while monotonic() < end:
            begin = monotonic()
            error = failing(lambda: device.broadcast_tokens(state=state, group=group, stream=stream).wait(20))
            if error:
                took, begin = monotonic() - begin, monotonic()
                again = failing(lambda: device.open_group(state=other, group=group))
                answered = monotonic() - begin
                written = failing(lambda: write_on_its_own_stream(device, other))
                return error, took, again, answered, written
        return None
