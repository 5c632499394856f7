"""Functions that the pool's ranks run for the tests; a task names this file and the function."""

import threading
from time import monotonic

import numpy as np
from hal_core.devices import close_groups, open_groups
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import GroupLost, HalError
from hal_core.group import Group
from hal_core.runtime.bound import bind
from hal_core.slots import fields


def open_all(rank, groups, timeout):
    """Open groups; every rank calls it."""
    open_groups(groups, timeout=timeout)


def open_own(rank, by_rank):
    """Open the state that is given for each rank; return the error."""
    return failing(lambda: open_groups(by_rank[rank.rank], timeout=3.0))


def failing(call):
    """Return the error's class and text, or None."""
    try:
        call()
    except HalError as error:
        return type(error).__name__, str(error)
    return None


def group_of(rank, groups):
    """Return the one of ``groups`` that contains the rank."""
    return Group(next(ranks for ranks in groups if rank.rank in ranks), rank.rank)


def scribble(state, seed):
    """Write random bytes over the whole state, headers included."""
    data = np.random.default_rng(seed).integers(0, 256, state.layout.nbytes, np.uint8)
    state.memory.buffer[: state.layout.nbytes] = data


def content(state):
    """Return all bytes of a state."""
    return state.memory.buffer[: state.layout.nbytes].tobytes()


def agree(rank, groups, idle, sizes, seed, calls):
    """Broadcast a scribbled state, except on the groups in ``idle``; return the bytes before each call, and at the
    end.
    """
    group = group_of(rank, groups)
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(sizes)
        bytes_seen = []
        for call in range(calls):
            scribble(state, [seed, rank.rank, call])
            bytes_seen.append(content(state))
            if group.ranks not in idle:
                device.broadcast_tokens(state=state, group=group, stream=device.default_stream).wait(10)
            bytes_seen.append(content(state))
        return bytes_seen


def hang_on(rank, ranks, most=30.0):
    """Broadcast until the group is lost; return the error, the duration of its call, and the error of a later call."""
    group = Group(ranks, rank.rank)
    with bind(CpuPlugin.open(0, {})) as device:
        state = device.state(fields.StateConfig(num_slots=4, max_model_len=16))
        end = monotonic() + most
        while monotonic() < end:
            begin = monotonic()
            try:
                device.broadcast_tokens(state=state, group=group, stream=device.default_stream).wait()
            except GroupLost as error:
                took, begin = monotonic() - begin, monotonic()
                again = failing(lambda: device.open_group(state=device.state(state.sizes, name="b"), group=group))
                return str(error), took, again, monotonic() - begin
        return None


def leave(rank):
    """Close every group; return the number of watchdogs that are left."""
    close_groups()
    close_groups()
    return [t.name for t in threading.enumerate() if t.name.startswith("hal-watchdog")]
