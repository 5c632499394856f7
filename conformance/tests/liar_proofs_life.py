"""Proofs that liars about copies, tickets and a device's life lie."""

import gc
import logging
import os
import threading
import warnings
import weakref
from functools import partial

from hal_conformance.harness.sinks import FullSink
from hal_conformance.liars import faults
from hal_core.errors import (
    DeviceClosed,
    GroupLost,
    HalError,
    InvalidBatch,
    InvalidValue,
    OutOfMemory,
    SinkFull,
    TicketTimeout,
)
from hal_core.group import Group
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    POISON,
    column,
    copied,
    cpu,
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
    write,
)

# -- copies and tickets ---------------------------------------------------------------------------------------------


@proof("CopyDoneEarly", queued)
def _(bound):
    memory = poisoned(bound, 64)
    with bound.device.hold_stream(bound.default_stream):
        return not copied(bound, memory, [(0, 64)]).done()


@proof("TimeoutReturnsQuietly", queued)
def _(bound):
    memory = poisoned(bound, 64)
    with bound.device.hold_stream(bound.default_stream):
        ticket = copied(bound, memory, [(0, 64)])
        return raises(TicketTimeout, lambda: ticket.wait(0.02))


@proof("TimeoutsInMilliseconds", queued)
def _(bound):
    memory, early = poisoned(bound, 64), []
    with bound.device.hold_stream(bound.default_stream):
        ticket = copied(bound, memory, [(0, 64)])
        thread = threading.Thread(target=lambda: early.append(raises(TicketTimeout, lambda: ticket.wait(PATIENCE))))
        thread.start()
        thread.join(PATIENCE if lies(bound) else A_WHILE)
    thread.join(PATIENCE)
    return early == [False]


@proof("ZeroMeansForEver", queued)
def _(bound):
    memory = poisoned(bound, 64)
    with bound.device.hold_stream(bound.default_stream):
        ticket = write(bound, flat(memory, 0, 64), 1)
        return ends(lambda: raises(TicketTimeout, lambda: ticket.wait(0)), A_WHILE if lies(bound) else PATIENCE)


@proof("SecondWaiterIsToldDone", queued)
def _(bound):
    memory, told, both = poisoned(bound, 64), [], threading.Barrier(2)

    def wait(ticket):
        both.wait(PATIENCE)
        told.append(raises(TicketTimeout, lambda: ticket.wait(A_WHILE)))

    with bound.device.hold_stream(bound.default_stream):
        ticket = copied(bound, memory, [(0, 64)])
        threads = [threading.Thread(target=wait, args=(ticket,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    return told == [True, True]


@proof("FourBuffersInTurn", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    first = copied(bound, memory, [(0, 64)]).data[0]
    raw(memory)[...] = 1
    for _ in range(4):
        copied(bound, memory, [(0, 64)]).data  # noqa: B018 (looking is the point)
    return (first == POISON).all()


@proof("CopyIsAView", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    first = copied(bound, memory, [(0, 64)]).data[0]
    write(bound, flat(memory, 0, 64), 1)
    return (first == POISON).all()


@proof("LargeCopiesInPieces", queued)
def _(bound):
    memory = poisoned(bound, 1 << 20)
    first = copied(bound, memory, [(0, 1 << 20)])
    write(bound, flat(memory, 0, 1 << 20), 1).wait(PATIENCE)
    first.wait(PATIENCE)
    return (first.data[0] == POISON).all()


@proof("PartsInMemoryOrder", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    raw(memory)[:2] = 1, 2
    return [part.tolist() for part in copied(bound, memory, [(1, 1), (0, 1)]).data] == [[2], [1]]


def out_of_bounds(bound):
    """The ticket of an output with a count that a kernel wrote out of bounds."""
    state = state_of(bound, 1)
    insert(bound, state, [prefill(state, 0)])
    column(state, "accept_num")[0] = 99
    ticket = bound.save_output(state=state, step=step_of(state, 1, [0]), sink=MemorySink(), stream=bound.default_stream)
    return state, ticket


@proof("FailureToldOnce", cpu)
def _(bound):
    _, ticket = out_of_bounds(bound)
    assert raises(InvalidValue, lambda: ticket.wait(PATIENCE))
    return raises(InvalidValue, lambda: ticket.wait(PATIENCE))


# -- life -----------------------------------------------------------------------------------------------------------


@proof("SyncCalledAsync", cpu)
def _(bound):
    return write(bound, flat(poisoned(bound, 64), 0, 64), 1).mode == "sync"


@proof("AsyncCalledSync", queued)
def _(bound):
    with bound.device.hold_stream(bound.default_stream):
        return write(bound, flat(poisoned(bound, 64), 0, 64), 1).mode == "async"


@proof("LogsEveryCall", cpu)
def _(bound):
    records, memory = [], poisoned(bound, 64)
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hal").addHandler(handler)
    try:
        for value in range(3):
            write(bound, flat(memory, 0, 64), value)
    finally:
        logging.getLogger("hal").removeHandler(handler)
    return not records  # the one record was made when the device was bound


@proof("SwallowsFaults", pressed())
def _(bound):
    with bound.device.hold_stream(bound.default_stream):
        fill(bound, bound.default_stream)
        return raises(OutOfMemory, lambda: fill(bound, bound.default_stream, count=1))


@proof("OutOfMemoryIsBare", pressed())
def _(bound):
    with bound.device.hold_stream(bound.default_stream):
        fill(bound, bound.default_stream)
        try:
            fill(bound, bound.default_stream, count=1)
        except MemoryError as error:
            return isinstance(error, HalError)
    return False


@proof("UnseenCountsAsSeen", cpu)
def _(bound):
    state, _ = out_of_bounds(bound)
    return raises(InvalidValue, lambda: insert(bound, state, []))


@proof("CloseDropsCopies", pressed())
def _(bound):
    memory, stream = poisoned(bound, 64), bound.default_stream
    with bound.device.hold_stream(stream):
        ticket = copied(bound, memory, [(0, 64)])
        bound.device.close()
    ticket.wait(PATIENCE)
    arrived = (ticket.data[0] == POISON).all()
    getattr(ticket, "inner", ticket).wait(PATIENCE)  # a liar's own copy: until here it uses this memory
    return arrived


@proof("ForkGoesOn", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that do not survive: the child uses none
        child = os.fork()
    if child == 0:
        os._exit(0 if raises(DeviceClosed, lambda: write(bound, flat(memory, 0, 64), 1)) else 1)
    return os.waitpid(child, 0)[1] == 0


@proof("FreedUnderWork", pressed())
def _(bound):
    stream, source, target = bound.default_stream, poisoned(bound, 4096), poisoned(bound, 4096)
    value, freed = flat(source, 0, 4096), []
    for memory in (source, target):  # not freed: the held work still reads and writes it
        memory._free = partial(freed.append, memory._free)
    del memory
    with bound.device.hold_stream(stream):
        write(bound, flat(target, 0, 4096), value, stream)
        del source, value
        bound.device.retired.reap()
        return not freed


@proof("LeaksDeviceMemory", cpu)
def _(bound):
    memory, before = poisoned(bound, 64), bound.counters().allocations
    for value in range(3):
        write(bound, flat(memory, 0, 64), value)
    return bound.counters().allocations == before


@proof("KeepsEveryTicket", cpu)
def _(bound):
    data = weakref.ref(copied(bound, poisoned(bound, 64), [(0, 64)]).data[0])
    return data() is None


@proof("CopiesUntilAWrite", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    data = weakref.ref(copied(bound, memory, [(0, 64)]).data[0])
    remembered = data() is not None
    write(bound, flat(memory, 0, 64), 7)
    return not (remembered and data() is None)


@proof("AlignedToSixteen", cpu)
def _(bound):
    return all(bound.device.allocate(nbytes).address % 64 == 0 for nbytes in (1, 64, 1000))


def told_preempted(sink):
    return sum((record.status == SlotStatus.PREEMPTED).sum() for record in sink.records)


def preempted(bound):
    """A state with two requests, the first of which was preempted."""
    state = state_of(bound, 2)
    tasks = [prefill(state, 0), prefill(state, 1)]
    insert(bound, state, tasks)
    insert(bound, state, [Task(TaskKind.PREEMPTED, 0, tasks[0].request)])
    return state


@proof("PreemptionToldTwice", cpu)
def _(bound):
    state, full, sink, stream = preempted(bound), FullSink(), MemorySink(), bound.default_stream
    assert raises(
        SinkFull, lambda: bound.save_output(state=state, step=step_of(state, 1, [0, 1]), sink=full, stream=stream)
    )
    bound.save_output(state=state, step=step_of(state, 2, [0, 1]), sink=sink, stream=stream)
    full.resolve_all()
    return told_preempted(full) + told_preempted(sink) == 1


@proof("ForgetsWhoWasNotNamed", cpu)
def _(bound):
    state, sink = preempted(bound), MemorySink()
    for number, slots in enumerate([[1], [0, 1]]):
        bound.save_output(state=state, step=step_of(state, number, slots), sink=sink, stream=bound.default_stream)
    return told_preempted(sink) == 1


@proof("LeavesWhatIsNotHeld", cpu)
def _(bound):
    state = state_of(bound, 1)
    gone = Task(TaskKind.ABORTED, 0, prefill(state, 0).request)
    return raises(InvalidBatch, lambda: insert(bound, state, [gone]))


def losing():
    """A device whose groups lose a rank at once."""
    device = faults.lay(cpu(), faults.LostPeer)
    device.fault.at = 2  # the opening succeeds
    return device


@proof("LossIsToldOnce", losing)
def _(bound):
    state, pair = state_of(bound, 1), Group((0, 1), 0)

    def broadcast():
        bound.broadcast_tokens(state=state, group=pair, stream=bound.default_stream).wait(PATIENCE)

    return all(raises(GroupLost, broadcast) for _ in range(3))


def dropped(bound):
    """Another device of the kind as its opener gets it, and its primitives."""
    device = type(bound.device)(0, {})
    getattr(device, "laid", lambda: None)()
    return device, device.primitives


@proof("DroppedIsKept", queued)
@proof("EveryDeviceIsListed", queued)
def released_when_dropped(bound):
    device, below = dropped(bound)
    gone = weakref.ref(device)
    del device
    gc.collect()
    return gone() is None and not below.memory
