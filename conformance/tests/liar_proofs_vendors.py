"""Proofs that the liars of vendors of real runtimes lie: events, neighbours, host memory, counts, slots, objects."""

from dataclasses import replace

import numpy as np
import pytest
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    PATIENCE,
    column,
    cpu,
    flat,
    insert,
    poisoned,
    prefill,
    proof,
    queued,
    raises,
    raw,
    state_of,
    step_of,
    update,
    write,
)
from queued_device import QueueDevice

# -- events of another opened device -----------------------------------------------------------------------------------


@proof("RefusesOthersEvents", queued)
@proof("IgnoresOthersEvents", queued)
def waited_for(bound):
    """Whether a stream takes the event of another opened device, and waits for it."""
    other = queued()
    try:
        stream, memory = bound.default_stream, poisoned(bound, 64)
        with other.hold_stream(other.default_stream):
            if raises(Exception, lambda: stream.wait(other.event(other.default_stream))):
                return False
            ticket = write(bound, flat(memory, 0, 64), 1)
            early = raises(Exception, lambda: ticket.wait(0.2))
        ticket.wait(PATIENCE)
        return early
    finally:
        other.close()


# -- what lies beside a target -----------------------------------------------------------------------------------------


@proof("WordsReadAtTheCall", queued, 0)
@proof("GapsReadAtTheCall", queued, 2)
def neighbours_kept(bound, step):
    """Whether a write that waits, of each ``step``-th byte, keeps the bytes written between them meanwhile."""
    memory, stream, other = poisoned(bound, 64), bound.default_stream, bound.device.stream()
    target = flat(memory, 0, 64)[1::step] if step else flat(memory, 1, 1)
    with bound.device.hold_stream(stream):
        ticket = write(bound, target, np.ones(target.shape, np.uint8), stream)
        write(bound, flat(memory, 2, 1), 7, other).wait(PATIENCE)
    ticket.wait(PATIENCE)
    return raw(memory)[2] == 7


# -- host memory -------------------------------------------------------------------------------------------------------


class LockedQueue(QueueDevice):
    """The asynchronous example with host memory of its runtime, on boundaries of 4096 bytes."""

    capabilities = replace(QueueDevice.capabilities, pinned_host=True)

    def __init__(self):
        super().__init__(0, {})
        self.locked, primitives = {}, self.primitives
        primitives.allocate_host, primitives.free_host = self.lock, self.locked.pop

    def lock(self, nbytes):
        block = np.empty(nbytes + 4096, np.uint8)
        address = -(-block.ctypes.data // 4096) * 4096
        self.locked[address] = block
        return address


def locked(bound):
    """Whether ``allocate_host`` gives memory that the runtime has locked."""
    device = bound.device
    return all(device.primitives.allocate_host(nbytes) in device.locked for nbytes in (1, 1 << 16))


for name in ("PinnedInName", "PinnedByMalloc", "PinnedByAlignment", "PinnedIfSmall"):
    proof(name, LockedQueue)(locked)

# -- counts and objects of the driver ----------------------------------------------------------------------------------


def opencl():
    pytest.importorskip("hal_opencl")
    from hal_opencl import OpenCLPlugin

    probe = OpenCLPlugin.probe()
    if not probe.available:
        pytest.skip(f"{probe.reason} ({probe.cure})")
    return OpenCLPlugin.open(0, {})


def counted(bound, target, value):
    """Whether a write adds to the device's counts what reached its driver."""
    device = bound.device
    own, below = device.counters(), device.probe_counts()
    write(bound, target, value).wait(PATIENCE)
    own, below = device.counters() - own, device.probe_counts() - below
    return (own.submissions, own.launches) == (below.submissions, below.launches)


@proof("CopiesWithinUncounted", opencl)
def _(bound):
    memory = bound.device.allocate(128)
    return counted(bound, flat(memory, 0, 64), flat(memory, 64, 64))


@proof("StridedCountedTwice", queued)
def _(bound):
    return counted(bound, flat(bound.device.allocate(64), 0, 64)[::2], np.ones(32, np.uint8))


def kept(bound, name, act):
    """Return how many calls of a primitive 200 rounds make, beyond the first 50: pools are full then."""
    primitives, rounds = bound.device.primitives, 0
    true = getattr(primitives, name)

    def count(*arguments):
        nonlocal rounds
        rounds += 1
        return true(*arguments)

    setattr(primitives, name, count)
    for _ in range(50):
        act().wait(PATIENCE)
    before = rounds
    for _ in range(200):
        act().wait(PATIENCE)
    return rounds - before


@proof("LeaksEvents", queued)
def _(bound):
    memory = poisoned(bound, 64)
    return kept(bound, "event_create", lambda: write(bound, flat(memory, 0, 64)[::2], 1)) < 100


@proof("LeaksTemporaries", queued)
def _(bound):
    memory = poisoned(bound, 128)
    return not kept(bound, "allocate", lambda: write(bound, flat(memory, 0, 64), flat(memory, 64, 64)))


# -- traces of a slot's former request ---------------------------------------------------------------------------------


def left(bound, name):
    """Return a field of a slot after its request has ended and another one has taken it."""
    state = state_of(bound, 2)
    insert(bound, state, [prefill(state, 0, max_tokens=1)])
    column(state, "sampled_token_ids")[...] = 5
    update(bound, state, step_of(state, 0, [0])).wait(PATIENCE)
    assert column(state, name)[0, 0], "the request has ended, with a token"
    state.host_table.release([0])
    request = state.admit(Request("next", [3, 4], SamplingParams(max_tokens=4)))
    insert(bound, state, [Task(TaskKind.PREFILL, 0, request, 0, 2, [0])])
    return column(state, name)[0, 0]


@proof("StopReasonSurvives", cpu)
def _(bound):
    return left(bound, "stop_reason") == 0


@proof("AcceptNumSurvives", cpu)
def _(bound):
    return left(bound, "accept_num") == 0
