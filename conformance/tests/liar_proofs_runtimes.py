"""Proofs that liars below the base of devices lie: events, flushes, freed memory, faults, threads, types."""

import gc
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from hal_conformance.fixtures.kv_handover import KvHandover, kinds
from hal_conformance.harness.backdoor import put
from hal_conformance.liars import faults
from hal_conformance.test_lazy_tensors import LikeTorch
from hal_core.contract.support import Support
from hal_core.devices.primitives import poll
from hal_core.errors import DeviceClosed, HalError, InvalidBatch, InvalidValue, OutOfMemory, TicketTimeout
from hal_core.group import Group
from hal_core.handover.protocol import Arrived, HandoverKey
from hal_core.memory.dtypes import dtype_of
from hal_core.output.sinks import MemorySink
from hal_core.ranks import channel
from hal_core.slots.admission import Request, admit
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.fields import STATE_TABLE, StateConfig
from hal_core.slots.state import SlotState
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    POISON,
    RING,
    copied,
    cpu,
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

FAR = 1 << 32

# -- work that is not handed over, and events that pass too early -----------------------------------------------------


@proof("NeverFlushed", queued)
@proof("FlushedBeforeTheLast", queued)
def executed_unasked(bound):
    """Whether a write is executed that no thread waits for."""
    ticket = write(bound, flat(poisoned(bound, 64), 0, 64), 1)
    return poll(ticket.done, A_WHILE if lies(bound) else PATIENCE)


def copy_that_runs(bound, ended):
    """Whether a copy that has begun, and runs until a gate is opened, has ended."""
    memory, stream, gate = poisoned(bound, 64), bound.default_stream, threading.Event()
    bound.device.own(stream).beside.raw.put(gate.wait)
    try:
        ticket = copied(bound, memory, [(0, 64)])
        stream.synchronize(PATIENCE)  # all before the copy is done
        return ended(ticket)
    finally:
        gate.set()


@proof("RunningCountsAsDone", queued)
def _(bound):
    return not copy_that_runs(bound, lambda ticket: ticket.done())


@proof("WaitEndsAtTheBeginning", queued)
def _(bound):
    return copy_that_runs(bound, lambda ticket: raises(TicketTimeout, lambda: ticket.wait(0.05)))


# -- the ends of the ring's room --------------------------------------------------------------------------------------


@proof("WrapsIntoTheOldest", pressed(), wrapped=True)
@proof("RunsIntoTheOldest", pressed(), wrapped=False)
def oldest_span_kept(bound, wrapped):
    """Whether a held span's bytes survive a span one byte longer than the room before it: at the wrap, or behind."""
    free, held = bound.default_stream, bound.device.stream()
    memory = poisoned(bound, 4 * RING)

    def give(offset, nbytes, value, stream):
        ticket = write(bound, flat(memory, offset, nbytes), np.full(nbytes, value, np.uint8), stream)
        if stream is free:
            ticket.wait(PATIENCE)

    give(0, RING, 1, free)
    with bound.device.hold_stream(held):
        give(0, RING // 4, 2, free)
        give(2 * RING, RING // 8, 3, held)
        give(0, RING // 2, 4, free)
        if not wrapped:
            give(0, 3 * RING // 16, 5, free)
        with suppress(OutOfMemory):
            give(RING, RING // 4 + 1 if wrapped else RING // 16 + 1, 6, free)
    held.synchronize(PATIENCE)
    return (raw(memory)[2 * RING : 2 * RING + RING // 8] == 3).all()


# -- memory -----------------------------------------------------------------------------------------------------------


@proof("CopiesDoNotKeep", queued, 1)
@proof("EightAreKept", queued, 16)
def dropped_sources_kept(bound, count):
    """Whether no new memory lies where a pending copy reads memory that was dropped."""
    stream = bound.default_stream
    sources = [poisoned(bound, 4096) for _ in range(count)]
    read = {memory.address for memory in sources}
    with bound.device.hold_stream(stream):
        copies = [copied(bound, memory, [(0, 4096)]) for memory in sources]
        while sources:
            sources.pop()
            gc.collect()
            bound.device.allocate(1)
        given = [bound.device.allocate(4096) for _ in range(count)]
        assert not any(copy.done() for copy in copies)
        return not read & {memory.address for memory in given}


@proof("StepsLeakScratch", queued)
def _(bound):
    state = state_of(bound, 2)
    insert(bound, state, [prefill(state, 0)])
    before = len(bound.device.primitives.memory)
    update(bound, state, step_of(state, 1, [0])).wait(PATIENCE)
    return len(bound.device.primitives.memory) == before


@proof("InsertionsLeakTables", cpu)
def _(bound):
    state, before = state_of(bound, 4), bound.counters().allocations
    for slot in range(4):
        insert(bound, state, [prefill(state, slot)])
    return bound.counters().allocations == before


@proof("PlansLeakEvents", queued)
def _(bound):
    memory, below, made = poisoned(bound, 64), bound.device.primitives, []
    true = below.event_create
    below.event_create = lambda: made.append(1) or true()
    for _ in range(300):
        write(bound, flat(memory, 0, 64)[::2], 1).wait(PATIENCE)
    return len(made) < 300


@proof("HalfStatesAreKept", queued)
def _(bound):
    device = faults.lay(bound.device, faults.OutOfRoom)
    device.fault.at = 2
    with suppress(OutOfMemory):
        state_of(bound, 2)
    gc.collect()
    return device.fault.met == 1 and not any(one() is not None for one in device.given)


@proof("RawMemoryError", cpu)
def _(bound):
    device = faults.lay(bound.device, faults.OutOfRoom)
    device.raw, device.fault.at = True, 1
    try:
        state_of(bound, 2)
    except MemoryError as error:
        return isinstance(error, HalError)
    return False


# -- faults -----------------------------------------------------------------------------------------------------------


def broken(bound):
    bound.device.health.fault, bound.device.health.unusable = RuntimeError("error 716"), True


@proof("TensorsOfABrokenDevice", queued)
def _(bound):
    state = state_of(bound, 2)
    broken(bound)
    try:
        state.tensor("seed")
    except DeviceClosed:
        return True
    except HalError:  # no framework can use this device's addresses, but that is a different error
        pass
    return False


@proof("FaultForgottenOnceRaised", queued)
def _(bound):
    memory = poisoned(bound, 64)
    broken(bound)
    return all(raises(DeviceClosed, lambda: write(bound, flat(memory, 0, 64)[::2], 1)) for _ in range(2))


def lost_step(bound):
    """A state, and the tickets of three steps, the copy of the second of which has failed."""
    state, tickets = state_of(bound, 1), []
    insert(bound, state, [prefill(state, 0)])
    for number in range(1, 4):
        call = {"state": state, "step": step_of(state, number, [0]), "stream": bound.default_stream}
        tickets.append(bound.save_output(sink=MemorySink(), **call))
        if number == 2:
            late = state_of(bound, 1)
            ticket = bound.device.copy_out(late.memory, [state.output_range(topk=False)], bound.default_stream)
            lost = bound.save_output(sink=Unread(), **call)
            lost._copy = faults.LateCopy(ticket, faults.refused("a copy"))
            tickets[-1] = lost
    return state, tickets


class Unread(MemorySink):
    """Resolves no output."""

    def put(self, pending):
        self.pending = pending


def taken(bound):
    """Return the step numbers of three takes; None where one raises."""
    state, tickets = lost_step(bound)
    found = []
    for ticket in tickets:
        try:
            record = state.take(ticket)
        except RuntimeError:
            found.append(None)
        else:
            found.append(record and record.step)
    return found


@proof("LostStepsRepeat", cpu)
def _(bound):
    return taken(bound) == [1, None, 3]


@proof("LostStepsAreLate", cpu)
def _(bound):
    state, (first, lost, _) = lost_step(bound)
    state.take(first)
    return raises(faults.CopyFailed, lambda: state.take(lost))


# -- threads ----------------------------------------------------------------------------------------------------------


def works_elsewhere(bound, call):
    """Whether a call works on another thread than the opener's."""
    raised = []

    def run():
        try:
            call()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    return not raised


@proof("WritesOfTheOpener", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    return works_elsewhere(bound, lambda: write(bound, flat(memory, 0, 64), 1))


@proof("CopiesOfTheOpener", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    return works_elsewhere(bound, lambda: copied(bound, memory, [(0, 64)]))


@proof("MemoryOfTheOpener", cpu)
def _(bound):
    return works_elsewhere(bound, lambda: bound.device.allocate(64))


# -- values and places ------------------------------------------------------------------------------------------------


@proof("NaNsAreRounded", cpu)
def _(bound):
    memory = poisoned(bound, 4)
    write(bound, flat(memory, 0, 2, "bfloat16"), np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32))
    return (raw(memory).view(np.uint16) & 0x7FFF > 0x7F80).all()


@proof("NaNsAreCut", cpu)
def _(bound):
    memory = poisoned(bound, 8)
    write(bound, flat(memory, 0, 2, "float32"), np.array([0x7FF0000000000001] * 2, np.uint64).view(np.float64))
    return np.isnan(raw(memory).view(np.float32)).all()


@proof("NegativeBitIgnored", cpu)
def _(bound):
    memory = poisoned(bound, 16)
    write(bound, flat(memory, 0, 4, "int32"), LikeTorch(np.arange(4, dtype=np.int32), negative=True))
    return raw(memory).view(np.int32).tolist() == [0, -1, -2, -3]


@proof("LayoutIgnored", cpu)
def _(bound):
    sparse = LikeTorch(np.ones(4, np.int32), layout="torch.sparse_coo")
    return raises(InvalidValue, lambda: write(bound, flat(poisoned(bound, 16), 0, 4, "int32"), sparse))


@proof("PlacesInThirtyTwoBits", cpu)
def _(bound):
    memory = bound.device.allocate(FAR + 64)
    raw(memory)[0] = raw(memory)[FAR] = POISON
    put(bound.device, memory, [(FAR, b"\7")], bound.default_stream)
    return raw(memory)[0] == POISON and raw(memory)[FAR] == 7


@proof("PlacesInThirtyOneBits", cpu)
def _(bound):
    memory = bound.device.allocate(FAR)
    raw(memory)[FAR // 2] = POISON
    put(bound.device, memory, [(FAR // 2, b"\7")], bound.default_stream)
    return raw(memory)[FAR // 2] == 7


# -- companions, groups, handovers ------------------------------------------------------------------------------------


def with_companions(bound):
    sizes = StateConfig(num_slots=4, max_model_len=16, max_logprobs=0)
    beside = ["first", Companion("second", [StateField("own", "int32")])]
    return bound.state(sizes, beside=beside)


def refused(bound, state, tasks):
    """Whether a batch is refused, and the companions record no entry of it."""
    call = {"state": state, "tasks": tasks, "stream": bound.default_stream}
    told = raises((InvalidBatch, InvalidValue), lambda: bound.insert_tasks(**call))
    return told and not any(companion.host_table.live for companion in state.companions)


@proof("CompanionsBookRefusals", cpu)
def _(bound):
    state = with_companions(bound)
    return refused(bound, state, [prefill(state, 0), prefill(state, 9)])


@proof("CompanionsBookInTurn", cpu)
def _(bound):
    state = with_companions(bound)
    bare = admit(Request("bare", [1, 2]), state.layout)
    return refused(bound, state, [prefill(state, 0), Task(TaskKind.PREFILL, 1, bare, 0, 2, [1])])


@proof("SizesAreCompared", cpu, "sampled_token_ids", "float64")
@proof("OtherTypesLeftOut", cpu, "temperature", "int32")
def types_compared(bound, name, dtype):
    """Whether ranks whose states differ in one field's element type have other terms."""
    sizes, group = StateConfig(num_slots=2, max_model_len=16), Group((0, 1), 0)
    table = [replace(one, dtype=dtype_of(dtype)) if one.name == name else one for one in STATE_TABLE]
    states = [SlotState(bound.device, sizes, name="target", table=lines) for lines in (STATE_TABLE, table)]
    one, other = (channel.shared_config_of(state, group).block() for state in states)
    return one != other


def two_handovers(bound):
    """Two handovers in flight at once between two transfers."""
    transfers = KvHandover(
        SimpleNamespace(bound=bound, device=bound.device, subject=SimpleNamespace(support=Support()))
    )
    keys = HandoverKey("one", 0), HandoverKey("two", 0)
    for key, places in zip(keys, ([0, 1], [2, 3]), strict=True):
        transfers.reserve(key, places)
    return transfers, keys


@proof("LastReservationTakesAll", cpu)
def _(bound):
    transfers, (one, _) = two_handovers(bound)
    with transfers:
        transfers.send(one, 0, [5, 6])
        transfers.seal(one, 2)
        transfers.until(lambda: bool(transfers.d.told), "an end")
        held = transfers.d.cache.held()
        return kinds(transfers.d.told) == [Arrived] and (held[2:4] == transfers.d.cache.filled[2:4]).all()


@proof("OlderHandoversEndToo", cpu)
def _(bound):
    transfers, (_, two) = two_handovers(bound)
    with transfers:
        transfers.d.transfer.cancel(two)
        transfers.look()
        return len(transfers.d.told) == 1
