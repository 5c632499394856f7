"""Proofs that the first liars lie: order, tickets, values and rows, drafts, events of a ring, several memories."""

from dataclasses import replace

import numpy as np
from hal_conformance.harness.sinks import KeepingSink
from hal_conformance.liars import faults
from hal_core.devices.base import plan_value
from hal_core.errors import TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import PlanBuilder
from hal_core.memory.views import View
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    POISON,
    column,
    copied,
    cpu,
    ends,
    flat,
    insert,
    lies,
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

# -- order and tickets -------------------------------------------------------------------------------------------------


@proof("WritesLate", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    write(bound, flat(memory, 0, 64), 1).wait(PATIENCE)
    return (raw(memory) == 1).all()


@proof("DoneEarly", queued)
def _(bound):
    memory = poisoned(bound, 64)
    plan = plan_value(flat(memory, 0, 64), np.ones(64, np.uint8))
    with bound.device.hold_stream(bound.default_stream):
        early = bound.device.submit(plan, bound.default_stream).done()
    return not early


def returns_while_held(bound, call):
    """Whether a call returns while its stream is held; the stream is released then."""
    hold = bound.device.hold_stream(bound.default_stream)
    hold.__enter__()
    try:
        return ends(call, A_WHILE if lies(bound) else PATIENCE)
    finally:
        hold.__exit__(None, None, None)


@proof("WaitsInside", queued)
def _(bound):
    memory = poisoned(bound, 64)
    return returns_while_held(bound, lambda: write(bound, flat(memory, 0, 64), 1))


@proof("CopiesWhileHeld", queued)
def _(bound):
    memory = poisoned(bound, 64)
    return returns_while_held(bound, lambda: copied(bound, memory, [(0, 64)]))


@proof("CountsOne", queued)
def _(bound):
    device, memory = bound.device, poisoned(bound, 64)
    own, below = device.counters(), device.probe_counts()
    write(bound, flat(memory, 0, 64)[::2], 1).wait(PATIENCE)
    return (device.counters() - own).submissions == (device.probe_counts() - below).submissions


@proof("DoneOnceWaited", queued)
def _(bound):
    ticket = write(bound, flat(poisoned(bound, 64), 0, 64), 1)
    bound.default_stream.synchronize(PATIENCE)
    return ticket.done()


@proof("DoneWithItsStream", queued)
def _(bound):
    stream = bound.default_stream
    ticket = write(bound, flat(poisoned(bound, 64), 0, 64), 1)
    stream.synchronize(PATIENCE)
    with bound.device.hold_stream(stream):
        return ticket.done()


@proof("EventsUsedAgain", queued, 256)
@proof("ManyEventsUsedAgain", queued, 1024)
def kept_by_its_own_event(bound, calls):
    """Whether the ticket of a held write stays pending while so many calls on another stream are done."""
    memory, held, other = poisoned(bound, 128), bound.default_stream, bound.device.stream()
    with bound.device.hold_stream(held):
        ticket = write(bound, flat(memory, 0, 64), 1)
        for _ in range(calls):
            last = write(bound, flat(memory, 64, 64), 2, other)
        last.wait(PATIENCE)
        return not ticket.done()


# -- values ------------------------------------------------------------------------------------------------------------


@proof("WordsOnly", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    write(bound, flat(memory, 0, 3), 1).wait(PATIENCE)
    return raw(memory)[3] == POISON


@proof("NoStrides", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    write(bound, flat(memory, 0, 64)[::2], 1).wait(PATIENCE)
    return (raw(memory)[1::2] == POISON).all()


@proof("Int32Only", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    write(bound, flat(memory, 0, 8, "int64"), np.full(8, 1 << 40)).wait(PATIENCE)
    return (raw(memory).view(np.int64) == 1 << 40).all()


@proof("BoolAsInt", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    write(bound, flat(memory, 0, 4, "bool"), True).wait(PATIENCE)
    return (raw(memory)[4:] == POISON).all()


@proof("ByReference", cpu)
def _(bound):
    memory, value = poisoned(bound, 64), np.ones(64, np.uint8)
    builder = PlanBuilder(memory)
    builder.copy([0], 64, value)
    bound.device.submit(builder.build(), bound.default_stream).wait(PATIENCE)
    value[...] = 2
    ticket = copied(bound, memory, [(0, 64)])
    ticket.wait(PATIENCE)
    return (np.asarray(ticket.data[0]) == 1).all()


@proof("FirstWins", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    builder = PlanBuilder(memory)
    for value in (1, 2):
        builder.fill([0], 64, np.uint8(value))
    bound.device.submit(builder.build(), bound.default_stream).wait(PATIENCE)
    return (raw(memory) == 2).all()


@proof("NoArrays", cpu)
def _(bound):
    target = View.contiguous(poisoned(bound, 64), 0, (4, 16), dtype_of("uint8"))
    return not raises(Exception, lambda: write(bound, target, np.ones((4, 16), np.uint8)))


@proof("SilentFallback", cpu)
def _(bound):
    ticket = write(bound, flat(poisoned(bound, 64), 0, 64), 1)
    return bound.capabilities.async_h2d == (ticket.mode == "async")


@proof("ExpandedAsContiguous", cpu)
def _(bound):
    memory = poisoned(bound, 128)
    raw(memory)[:64] = np.arange(64)
    value = View(memory, 0, (4, 8), (0, 1), dtype_of("uint8"))
    write(bound, View.contiguous(memory, 64, (4, 8), dtype_of("uint8")), value).wait(PATIENCE)
    return (raw(memory)[64:96].reshape(4, 8) == np.arange(8)).all()


@proof("OverlapsInPieces", cpu)
def _(bound):
    memory = poisoned(bound, 64)
    raw(memory)[...] = np.arange(64)
    write(bound, flat(memory, 8, 48), flat(memory, 0, 48)).wait(PATIENCE)
    return (raw(memory)[8:56] == np.arange(48)).all()


@proof("ForgetsTheLastMemory", cpu)
def _(bound):
    first, second = poisoned(bound, 64), poisoned(bound, 64)
    plans = [plan_value(flat(memory, 0, 64), np.uint8(1)) for memory in (first, second)]
    bound.device.submit_all(plans, bound.default_stream).wait(PATIENCE)
    return (raw(first) == 1).all() and (raw(second) == 1).all()


@proof("MemoriesApart", cpu)
def _(bound):
    plans = [plan_value(flat(poisoned(bound, 64), 0, 64), np.uint8(1)) for _ in range(2)]
    before = bound.counters()
    bound.device.submit_all(plans, bound.default_stream).wait(PATIENCE)
    return (bound.counters() - before).submissions == 1


# -- slots -------------------------------------------------------------------------------------------------------------


@proof("NoRowReset", cpu)
def _(bound):
    state = state_of(bound, 2)
    old = prefill(state, 0, range(3, 12))
    insert(bound, state, [old])
    insert(bound, state, [Task(TaskKind.ABORTED, 0, old.request)])
    state.release([0])
    insert(bound, state, [prefill(state, 0, (1, 2))])
    return not (column(state, "token_ids")[0, 2:12] >= 3).any()


@proof("PaddingGoesToSlotZero", cpu)
def _(bound):
    state = state_of(bound, 2)
    insert(bound, state, [prefill(state, 1)])
    return column(state, "seq_lens_this_time")[0, 0] == 0


@proof("OneSubmissionEach", cpu)
def _(bound):
    state = state_of(bound, 4)
    tasks, before = [prefill(state, slot) for slot in range(4)], bound.counters()
    insert(bound, state, tasks)
    return (bound.counters() - before).submissions <= 2


def stepped(bound, role=SplitRole.MIXED, **more):
    """Return a state after the first step of a request in slot 0, which gave token 5."""
    state = state_of(bound, 2, **more)
    request = state.admit(Request("request 0", [1, 2], SamplingParams(max_tokens=6), role=role))
    insert(bound, state, [Task(TaskKind.PREFILL, 0, request, 0, 2, [0])])
    column(state, "sampled_token_ids")[...] = 5
    update(bound, state, step_of(state, 0, [0])).wait(PATIENCE)
    return state


@proof("FeedsTheTokenBefore", cpu)
def _(bound):
    state = stepped(bound)
    return column(state, "next_tokens")[0, 0] == 5


@proof("PrefillGoesOn", cpu)
def _(bound):
    state = stepped(bound, SplitRole.PREFILL)
    return bool(column(state, "stop_flags")[0, 0])


# -- drafts ------------------------------------------------------------------------------------------------------------


def remote(bound):
    """Return a state with a request in slot 0 that another worker has prefilled, with one draft of two."""
    state = state_of(bound, 2, max_draft_tokens=2)
    request = state.admit(Request("request 0", [1, 2], SamplingParams(max_tokens=6), role=SplitRole.DECODE))
    task = Task(TaskKind.REMOTE_PREFILL, 0, request, 2, 0, [0], first_token=7, drafts=[8])
    insert(bound, state, [task])
    return state


@proof("OneDraftMore", cpu)
def _(bound):
    state = remote(bound)
    return column(state, "draft_tokens")[0, 1] != 8


def propose(bound, state, number, stream=None):
    step = step_of(state, number, [0])
    return bound.set_drafts(state=state, step=step, drafts={0: [6]}, stream=stream or bound.default_stream)


@proof("DraftsBesideTheirStep", queued)
def _(bound):
    state, other = stepped(bound, max_draft_tokens=2), bound.device.stream()
    column(state, "sampled_token_ids")[...] = 5
    with bound.device.hold_stream(bound.default_stream):
        update(bound, state, step_of(state, 1, [0]))
        ticket = propose(bound, state, 1, other)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))


def refused(bound):
    """Return a state whose drafts the driver has refused."""
    state = stepped(bound, max_draft_tokens=2)
    bound.device.fault.at = 1
    assert raises(faults.CopyFailed, lambda: propose(bound, state, 0))
    return state


def refusing():
    return faults.lay(cpu(), faults.FailingWrites)


@proof("RefusedDraftsAreBooked", refusing)
def _(bound):
    state = refused(bound)
    return not raises(Exception, lambda: propose(bound, state, 0))


@proof("RefusedDraftsAreHeld", refusing)
def _(bound):
    state = refused(bound)
    plain = step_of(state, 1, [0])
    return not raises(Exception, lambda: update(bound, state, plain))


# -- steps -------------------------------------------------------------------------------------------------------------


def advance(bound, state, number, tokens=(5,)):
    """Run one step of slot 0 that gives these tokens, several as a speculative step."""
    column(state, "sampled_token_ids")[...] = tokens[0]
    step = step_of(state, number, [0])
    if len(tokens) > 1:
        step = replace(step, speculative=True)
        column(state, "accept_tokens")[0, : len(tokens)] = tokens
        column(state, "accept_num")[0] = len(tokens)
    update(bound, state, step).wait(PATIENCE)


def entered(bound, prompt=(1, 2), tokens=32, more=None, **params):
    """Return a state with a request in slot 0, of which a step will prefill the whole prompt."""
    state = state_of(bound, 1, tokens, **(more or {}))
    insert(bound, state, [prefill(state, 0, prompt, max_tokens=20, **params)])
    return state


@proof("StopsFromThePrompt", cpu)
def _(bound):
    state = entered(bound, (1, 7), more={"max_stop_length": 2}, stop_sequences=((7, 5),))
    advance(bound, state, 0)
    return not column(state, "stop_flags")[0, 0]


@proof("ShortStopsOnly", cpu)
def _(bound):
    state = entered(bound, more={"max_stop_length": 9}, stop_sequences=((5,) * 9,))
    for number in range(9):
        advance(bound, state, number)
    return bool(column(state, "stop_flags")[0, 0])


@proof("EightAppended", cpu)
def _(bound):
    state = entered(bound, more={"max_draft_tokens": 8})
    advance(bound, state, 0)
    advance(bound, state, 1, range(10, 19))
    return column(state, "token_ids")[0, 3:12].tolist() == [*range(10, 19)]


@proof("StepPositionsInSixteenBits", cpu)
def _(bound):
    state = entered(bound, np.ones(65_540, np.int64), 65_600)
    advance(bound, state, 0)
    return column(state, "token_ids")[0, 65_540] == 5


# -- copies that a worker's own writes wait for ------------------------------------------------------------------------


@proof("OrdersAfterNoCopy", queued, other=False)
def held_by_a_copy(bound, other):
    """Whether a stream waits, by ``order_after_reads``, for a held copy of its memory, or of another memory."""
    device, read, written = bound.device, poisoned(bound, 64), poisoned(bound, 64)
    held, own = device.stream(), device.stream()
    with device.hold_stream(held):
        copied(bound, read, [(0, 64)], held)
        device.order_after_reads(own, written if other else read)
        return raises(TicketTimeout, lambda: own.synchronize(A_WHILE))


@proof("OrdersAfterEveryCopy", queued)
def _(bound):
    return not held_by_a_copy(bound, other=True)


def recorded(bound, **told):
    """Return the status of slot 1 in the record of a step of two requests; it was stopped before the step."""
    state = state_of(bound, 2)
    insert(bound, state, [prefill(state, slot, max_tokens=6) for slot in (0, 1)])
    column(state, "sampled_token_ids")[...] = 5
    column(state, "stop_flags")[1] = True
    step = replace(step_of(state, 0, [0, 1]), **told)
    update(bound, state, step).wait(PATIENCE)
    ticket = bound.save_output(state=state, step=step, sink=MemorySink(), stream=bound.default_stream)
    return SlotStatus(state.take(ticket).status[1])


@proof("LateErrorsDropped", cpu)
def _(bound):
    return recorded(bound, late_errors=lambda: {1: "no logits"}) is SlotStatus.ERROR


@proof("RecoveredAsError", cpu)
def _(bound):
    return recorded(bound, recovered={1: "its worker was lost"}) is SlotStatus.RECOVERED


@proof("LateErrorsReadEarly", queued)
def _(bound):
    state, read = state_of(bound, 1), []
    insert(bound, state, [prefill(state, 0, max_tokens=6)])
    step = replace(step_of(state, 0, [0]), late_errors=lambda: read.append(0) or {})
    update(bound, state, step).wait(PATIENCE)
    with bound.device.hold_stream(bound.default_stream):
        ticket = bound.save_output(state=state, step=step, sink=KeepingSink(), stream=bound.default_stream)
        early = bool(read)
    state.take(ticket)
    return not early
