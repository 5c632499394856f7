"""Proofs that liars lie: limits, events between the parts of a call, faults, drafts, copies that are read, releases."""

import gc
import threading
import weakref

import numpy as np
from hal_conformance.liars import faults, runtimes
from hal_core.devices.primitives import poll
from hal_core.errors import OutOfMemory, TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes
from hal_core.runtime.policy import Policy
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    POISON,
    RING,
    column,
    copied,
    cpu,
    flat,
    insert,
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
from liar_proofs_first import propose, refusing, stepped

# -- limits ------------------------------------------------------------------------------------------------------------

MANY = 70


@proof("WarpOfEndTokens", cpu, eos_token_ids=(*range(100, 99 + MANY), 5))
def last_one_stops(bound, **params):
    """Whether a request stops with token 5, the last of many that stop it."""
    state = state_of(bound, 1, max_eos=MANY, max_stop_sequences=MANY)
    insert(bound, state, [prefill(state, 0, max_tokens=9, **params)])
    column(state, "sampled_token_ids")[...] = 5
    update(bound, state, step_of(state, 0, [0])).wait(PATIENCE)
    return bool(column(state, "stop_flags")[0, 0])


@proof("EightStopSequences", cpu)
@proof("WavefrontOfStops", cpu)
def last_sequence_stops(bound):
    return last_one_stops(bound, stop_sequences=(*[(100 + at,) for at in range(MANY - 1)], (5,)))


@proof("WarpOfStopTokens", cpu)
def _(bound):
    state = state_of(bound, 1, tokens=64, max_stop_sequences=1, max_stop_length=33)
    stops = SamplingParams(max_tokens=60, stop_sequences=((5,) * 33,))
    request = state.admit(Request("request 0", [1], stops, [5] * 32))
    insert(bound, state, [Task(TaskKind.PREFILL, 0, request, 0, 33, [0, 1, 2])])
    column(state, "sampled_token_ids")[...] = 5
    update(bound, state, step_of(state, 0, [0])).wait(PATIENCE)
    return bool(column(state, "stop_flags")[0, 0])


@proof("WarpAppended", cpu)
def _(bound):
    state = state_of(bound, 1, tokens=64, max_draft_tokens=40)
    insert(bound, state, [prefill(state, 0, max_tokens=60)])
    column(state, "accept_tokens")[...] = 5
    column(state, "accept_num")[...] = 33
    step = Step(0, {state.name: np.array([0], np.int32)}, speculative=True)
    update(bound, state, step).wait(PATIENCE)
    return (column(state, "token_ids")[0, 2:35] == 5).all()


@proof("BlockOfDraftedSlots", cpu, 1025, 1)
@proof("VectorOfDrafts", cpu, 1, 9)
def last_draft_is_written(bound, slots, count):
    """Whether the last of ``count`` drafts of the last slot is written."""
    state = state_of(bound, slots, max_draft_tokens=count)
    insert(bound, state, [prefill(state, slot, max_tokens=14) for slot in range(slots)])
    column(state, "accept_num")[...] = 1
    step = step_of(state, 0, range(slots))
    update(bound, state, step).wait(PATIENCE)
    drafts = {slot: [*range(20, 20 + count)] for slot in range(slots)}
    bound.set_drafts(state=state, step=step, drafts=drafts, stream=bound.default_stream).wait(PATIENCE)
    return column(state, "draft_tokens")[slots - 1, count - 1] == 19 + count


@proof("EmptyRangesRefused", cpu)
def _(bound):
    return not raises(ValueError, lambda: copied(bound, poisoned(bound, 64), [(0, 0), (3, 2)]))


@proof("EmptyRangesLeftOut", cpu)
def _(bound):
    return [len(data) for data in copied(bound, poisoned(bound, 64), [(0, 0), (3, 2)]).data] == [0, 2]


@proof("ThousandRanges", cpu)
@proof("ThousandsOfRanges", cpu)
def last_range_is_read(bound):
    memory = poisoned(bound, 64)
    raw(memory)[9] = 1
    return copied(bound, memory, [*[(0, 1)] * 5000, (9, 1)]).data[-1][0] == 1


def roomless():
    return faults.lay(pressed()(), faults.OutOfRoom)


def refused_value(bound):
    """Write a value larger than the ring when there is no memory; return the error and the target's bytes."""
    memory, met = poisoned(bound, 3 * RING), None
    bound.device.fault.at = 1
    try:
        write(bound, flat(memory, 0, 3 * RING), np.ones(3 * RING, np.uint8))
    except Exception as error:  # noqa: BLE001 (it is judged)
        met = error
    bound.device.fault.at = 0
    bound.default_stream.synchronize(PATIENCE)
    return met, raw(memory)


@proof("AllocatorsOwnError", roomless)
def _(bound):
    return isinstance(refused_value(bound)[0], OutOfMemory)


@proof("WhatFitsIsWritten", roomless)
def _(bound):
    return (refused_value(bound)[1] == POISON).all()


# -- events and faults -------------------------------------------------------------------------------------------------


def pending_behind(bound, part, call):
    """Whether the ticket of a call is pending while the primitive ``part`` of it waits."""
    primitives, gate, ended = bound.device.primitives, threading.Event(), threading.Event()
    true = getattr(primitives, part)

    def late(*arguments):
        arguments[-1].put(gate.wait)
        true(*arguments)
        arguments[-1].put(ended.set)

    setattr(primitives, part, late)
    try:
        ticket = call()
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))
    finally:
        gate.set()
        ended.wait(PATIENCE)  # a liar's ticket is done earlier, and its memory would be freed under the work
        delattr(primitives, part)


@proof("EventOfTheUpload", queued)
@proof("EventBeforeTheUpload", queued)
def pending_write(bound):
    target = View(poisoned(bound, 64), 0, (16,), (4,), dtype_of("uint8"))
    return pending_behind(bound, "launch", lambda: write(bound, target, np.ones(16, np.uint8)))


@proof("EventBeforeTheLastCopy", queued)
def _(bound):
    return pending_behind(bound, "copy_out", lambda: copied(bound, poisoned(bound, 64), [(0, 8)]))


@proof("DroppedWithItsWork", pressed())
@proof("DroppedButItsEvents", queued)
def dropped_work(bound):
    """Whether the work of a stream that was dropped behind a held one is executed, and its ticket done."""
    memory, held = poisoned(bound, 64), bound.device.stream()
    with bound.device.hold_stream(held):
        dropped = bound.device.stream()
        dropped.wait(held.record())
        ticket = write(bound, flat(memory, 0, 64), 1, dropped)
        del dropped
        gc.collect()
        bound.device.allocate(1)
    honest = not isinstance(bound.device.primitives, runtimes.DropsWork)
    return poll(ticket.done, PATIENCE if honest else A_WHILE) and (raw(memory) == 1).all()


def memory_kept(bound, call):
    """Whether calls that fail keep no device memory."""
    given, true = [], bound.device.allocate

    def allocate(nbytes):
        memory = true(nbytes)
        given.append(weakref.ref(memory))
        return memory

    bound.device.allocate = allocate
    for _ in range(3):
        bound.device.fault.at = 1
        assert raises(faults.CopyFailed, call)
    gc.collect()
    return not any(one() for one in given)


@proof("RefusedWritesLeak", refusing)
def _(bound):
    memory = poisoned(bound, 64)
    return memory_kept(bound, lambda: write(bound, flat(memory, 0, 64), 1))


@proof("FailedCopiesLeak", lambda: faults.lay(cpu(), faults.FailingCopies))
def _(bound):
    memory = poisoned(bound, 64)
    return memory_kept(bound, lambda: copied(bound, memory, [(0, 64)]))


def faulty(bound):
    """Return the ticket of a write that the runtime reports as failed."""
    ticket = write(bound, flat(poisoned(bound, 64), 0, 64), 1)
    bound.device.events.error = lambda event: ArithmeticError("error 700")
    return ticket


@proof("FaultOfTheFirstWait", queued)
def _(bound):
    ticket = faulty(bound)
    return all(raises(ArithmeticError, lambda: ticket.wait(PATIENCE)) for _ in range(2))


@proof("FaultOfNobody", queued)
def _(bound):
    assert poll(faulty(bound).done, PATIENCE)
    return raises(ArithmeticError, lambda: write(bound, flat(poisoned(bound, 64), 0, 64), 1))


@proof("FailedIsPending", queued)
def _(bound):
    ticket = faulty(bound)
    assert raises(ArithmeticError, lambda: ticket.wait(PATIENCE))
    return ticket.done()


def late_error_is_raised(bound, call):
    """Whether the next call raises the late error of one that nobody waited for."""
    bound.device.fault.at = 1
    call()
    bound.default_stream.synchronize(PATIENCE)
    return raises(faults.CopyFailed, lambda: write(bound, flat(poisoned(bound, 64), 0, 64), 1))


@proof("UntrackedDrafts", lambda: faults.lay(cpu(), faults.LateWrites))
def _(bound):
    state = stepped(bound, max_draft_tokens=2)
    return late_error_is_raised(bound, lambda: propose(bound, state, 0))


@proof("UntrackedWrites", lambda: faults.lay(queued(), faults.LateWrites))
def _(bound):
    writes = Writes()
    writes.set(flat(poisoned(bound, 64), 0, 64), 1)
    return late_error_is_raised(bound, lambda: bound.write(writes=writes, stream=bound.default_stream))


# -- drafts ------------------------------------------------------------------------------------------------------------


@proof("DraftsOnTheDefaultStream", queued)
def _(bound):
    state, other = stepped(bound, max_draft_tokens=2), bound.device.stream()
    with bound.device.hold_stream(bound.default_stream):
        ticket = propose(bound, state, 0, other)
        patience = PATIENCE if type(bound.policy) is Policy else A_WHILE
        return not raises(TicketTimeout, lambda: ticket.wait(patience))


@proof("DraftsOnTheirOwnStream", queued)
def _(bound):
    state, other = stepped(bound, max_draft_tokens=2), bound.device.stream()
    with bound.device.hold_stream(other):
        ticket = propose(bound, state, 0, other)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


@proof("DraftsApart", cpu)
@proof("DraftsByField", cpu)
def drafts_are_one(bound):
    state = state_of(bound, 4, max_draft_tokens=2)
    insert(bound, state, [prefill(state, slot, max_tokens=9) for slot in range(4)])
    step = step_of(state, 0, range(4))
    update(bound, state, step).wait(PATIENCE)
    before = bound.counters()
    drafts = {slot: [7, 8] for slot in range(4)}
    bound.set_drafts(state=state, step=step, drafts=drafts, stream=bound.default_stream).wait(PATIENCE)
    return (bound.counters() - before).submissions == 1


@proof("WritesBesideTheirStep", queued)
def _(bound):
    state, other, writes = stepped(bound), bound.device.stream(), Writes()
    with bound.device.hold_stream(bound.default_stream):
        update(bound, state, step_of(state, 1, [0]))
        writes.fill(state.view("next_tokens"), [0], 3)
        ticket = bound.write(writes=writes, stream=other)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


@proof("WritesOfSeveralOnTheDefaultStream", queued)
def _(bound):
    memory, other, writes = poisoned(bound, 64), bound.device.stream(), Writes()
    writes.set(flat(memory, 0, 64), 1)
    with bound.device.hold_stream(bound.default_stream):
        ticket = bound.write(writes=writes, stream=other)
        patience = PATIENCE if type(bound.policy) is Policy else A_WHILE
        return not raises(TicketTimeout, lambda: ticket.wait(patience))


def steps_after(bound, leave):
    """Whether a plain step is taken after the slot with drafts was freed."""
    state = stepped(bound, max_draft_tokens=2)
    propose(bound, state, 0).wait(PATIENCE)
    leave(state)
    plain = step_of(state, 1, [0])
    return not raises(Exception, lambda: update(bound, state, plain))


@proof("ReleasedSlotsKeepDrafts", cpu)
def _(bound):
    return steps_after(bound, lambda state: state.release([0]))


@proof("LeftSlotsKeepDrafts", cpu)
def _(bound):
    def leave(state):
        insert(bound, state, [Task(TaskKind.ABORTED, 0, state.host_table.requests[0])])

    return steps_after(bound, leave)


# -- copies that are read, companions ----------------------------------------------------------------------------------


@proof("OrdersAfterNamedCopies", queued, [(0, 64)], named=False)
@proof("OrdersAfterTheNewestCopy", queued, [(0, 64)])
@proof("OrdersAfterWholeCopies", queued, [(16, 8)])
def ordered(bound, parts, *, named=True):
    """Whether a stream is ordered after a pending copy, since which another one was made on another stream."""
    device, memory = bound.device, poisoned(bound, 64)
    held, free, writer = [device.stream() for _ in range(3)]
    with device.hold_stream(held):
        copies = [copied(bound, memory, parts, held), copied(bound, memory, [(0, 1)], free)]
        copies[1].wait(PATIENCE)
        device.order_after_reads(writer, *([memory] if named else []))
        return raises(TicketTimeout, lambda: writer.synchronize(A_WHILE))


@proof("ReleasesReachNoCompanion", cpu)
@proof("ReleasesReachOneCompanion", cpu)
def freed_everywhere(bound):
    sizes = StateConfig(num_slots=2, max_model_len=16)
    state = bound.state(sizes, name="target", beside=["first", "second"])
    insert(bound, state, [prefill(state, 0)])
    state.release([0])
    return not any(companion.host_table.live for companion in state.companions)


def guarded(bound, tasks):
    """Whether a batch waits for a companion's step."""
    sizes = StateConfig(num_slots=2, max_model_len=64)
    state, other = bound.state(sizes, name="target", beside=["first"]), bound.device.stream()
    insert(bound, state, [prefill(state, 0)])
    companion = state.companions[0]
    with bound.device.hold_stream(bound.default_stream):
        step = step_of(companion, 0, [0])
        update(bound, companion, step)
        ticket = bound.insert_tasks(state=state, tasks=tasks(state.host_table.requests[0]), stream=other)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


@proof("LeavesBesideACompanionsStep", queued)
def _(bound):
    return guarded(bound, lambda request: [Task(TaskKind.ABORTED, 0, request)])


@proof("GrowsBesideACompanionsStep", queued)
def _(bound):
    return guarded(bound, lambda request: [Task(TaskKind.MORE_BLOCKS, 0, request, blocks=[3], first_block=1)])


@proof("LaterCompanionsBehind", cpu)
def _(bound):
    sizes = StateConfig(num_slots=2, max_model_len=64)
    state = bound.state(sizes, name="target", beside=["first", "second"])
    insert(bound, state, [prefill(state, 0)])
    insert(bound, state, [Task(TaskKind.MORE_BLOCKS, 0, state.host_table.requests[0], blocks=[3], first_block=1)])
    companion = state.companions[1]
    place, (slot,) = companion.layout.fields["blocks_num"], companion.host_table.live.values()
    begin = place.offset + slot * place.stride
    return raw(state.memory)[begin : begin + 4].view(np.int32)[0] == 2


@proof("MemsetByTheLowWord", cpu)
def _(bound):
    memory = poisoned(bound, 8 * 600)
    write(bound, flat(memory, 0, 600, "int64"), 1 << 32).wait(PATIENCE)
    return (raw(memory).view(np.int64) == 1 << 32).all()
