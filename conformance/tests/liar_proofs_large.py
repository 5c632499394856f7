"""Proofs that liars lie that are right up to a size or a number, and those about a place that has changed meanwhile."""

import numpy as np
from hal_conformance.harness.sinks import KeepingSink
from hal_core.devices.primitives import poll
from hal_core.errors import TicketTimeout
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    A_WHILE,
    PATIENCE,
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
from liar_proofs_limits import faulty

LARGE = 64 << 10

# -- values ------------------------------------------------------------------------------------------------------------


@proof("EngineIsLate", queued)
@proof("EngineIsEarly", queued)
def device_value_has_its_place(bound):
    """Whether a large device value has the bytes before it on its stream, and is there for the work after it."""
    source, target = poisoned(bound, LARGE), poisoned(bound, LARGE)
    first = bound.device.allocate(1)
    with bound.device.hold_stream(bound.default_stream):
        write(bound, flat(source, LARGE - 1, 1), 7)
        ticket = write(bound, flat(target, 0, LARGE), flat(source, 0, LARGE))
        write(bound, flat(first, 0, 1), flat(target, LARGE - 1, 1))
        raises(TicketTimeout, lambda: ticket.wait(A_WHILE))  # an engine that is early has run
    seen = copied(bound, first, [(0, 1)])
    seen.wait(PATIENCE)
    bound.close()  # the engine has ended
    return seen.data[0][0] == 7


@proof("EqualToBeforeTheStep", cpu)
def _(bound):
    state = state_of(bound, 1)
    insert(bound, state, [prefill(state, 0, max_tokens=9)])
    place = state.view("step_idx")[0]
    write(bound, place, 0)
    column(state, "sampled_token_ids")[...] = 5
    update(bound, state, step_of(state, 0, [0]))
    write(bound, place, 0)
    return column(state, "step_idx")[0, 0] == 0


@proof("EqualToBeforeThePlan", cpu)
def _(bound):
    state = state_of(bound, 1)
    place = state.view("token_ids")[0, :1]
    write(bound, place, 9)
    insert(bound, state, [prefill(state, 0)])
    write(bound, place, 9)
    return column(state, "token_ids")[0, 0] == 9


@proof("PagesComeLater", cpu)
def _(bound):
    memory = poisoned(bound, 4096)
    write(bound, flat(memory, 0, 4096), np.ones(4096, np.uint8))
    return (raw(memory) == 1).all()


@proof("CopiesComeLater", cpu)
def _(bound):
    memory, source = poisoned(bound, 4096), bound.device.allocate(4096)
    raw(source)[...] = 1
    write(bound, flat(memory, 0, 4096), flat(source, 0, 4096))
    return (raw(memory) == 1).all()


# -- many requests and slots -------------------------------------------------------------------------------------------


@proof("WavefrontsCountOnce", queued, 65)
@proof("RowsCountNothing", queued, 257)
def counts_are_true(bound, count):
    """Whether the counters of an insertion are those below the device."""
    state = state_of(bound, count)
    before, below = bound.counters(), bound.device.probe_counts()
    insert(bound, state, [prefill(state, slot) for slot in range(count)])
    said, seen = bound.counters() - before, bound.device.probe_counts() - below
    return said.submissions == seen.submissions


@proof("CleanUpOfOneBlock", cpu, 1025)
@proof("CleanUpOfLowSlots", cpu, 2049)
def all_are_cleaned(bound, count):
    """Whether the marks of so many requests that have left are gone after their step's output."""
    state = state_of(bound, count)
    tasks = [prefill(state, slot) for slot in range(count)]
    insert(bound, state, tasks)
    insert(bound, state, [Task(TaskKind.PREEMPTED, task.slot, task.request) for task in tasks])
    bound.save_output(
        state=state, step=step_of(state, 0, range(count)), sink=KeepingSink(), stream=bound.default_stream
    )
    return not column(state, "last_preempted").any()


# -- outputs that wait -------------------------------------------------------------------------------------------------


def saved_one(bound):
    """Return a state with a request that has given token 5, and the output of that step, which is not read yet."""
    state, sink = state_of(bound, 1), KeepingSink()
    task = prefill(state, 0, max_tokens=9)
    insert(bound, state, [task])
    column(state, "sampled_token_ids")[...] = 5
    update(bound, state, step_of(state, 0, [0])).wait(PATIENCE)
    bound.save_output(state=state, step=step_of(state, 0, [0]), sink=sink, stream=bound.default_stream)
    return state, task, sink


@proof("NamesOfNow", cpu)
def _(bound):
    state, task, sink = saved_one(bound)
    other = state.admit(Request("another", [1], SamplingParams(max_tokens=9)))
    insert(bound, state, [Task(TaskKind.ABORTED, 0, task.request), Task(TaskKind.PREFILL, 0, other, 0, 1, [0])])
    return sink.resolve_all()[0].request_ids == ("request 0",)


@proof("GoneAreLeftOut", cpu)
def _(bound):
    state, task, sink = saved_one(bound)
    insert(bound, state, [Task(TaskKind.ABORTED, 0, task.request)])
    return tuple(sink.resolve_all()[0].request_ids) == ("request 0",)


@proof("EightInFlight", queued, 9)
@proof("SixtyFourInFlight", queued, 65)
def outputs_do_not_wait(bound, count):
    """Whether so many outputs are saved while their stream is held."""
    state, sink = state_of(bound, 1), KeepingSink()
    insert(bound, state, [prefill(state, 0)])

    def act():
        for _ in range(count):
            bound.save_output(state=state, step=step_of(state, 0, [0]), sink=sink, stream=bound.default_stream)

    with bound.device.hold_stream(bound.default_stream):
        ended = ends(act, A_WHILE if lies(bound) else PATIENCE)
    assert poll(lambda: len(sink.pending) == count, PATIENCE)  # a liar's call ends now
    sink.resolve_all()
    return ended


# -- faults ------------------------------------------------------------------------------------------------------------


def fault_is_raised(bound, look):
    """Whether the next call raises the fault of a write whose ticket was looked at while its stream was held."""
    with bound.device.hold_stream(bound.default_stream):
        ticket = faulty(bound)
        look(ticket)
    assert poll(ticket.done, PATIENCE)
    return raises(ArithmeticError, lambda: write(bound, flat(poisoned(bound, 64), 0, 64), 1))


@proof("FaultAfterATimeout", queued)
def _(bound):
    return fault_is_raised(bound, lambda ticket: raises(TicketTimeout, lambda: ticket.wait(0)))


@proof("FaultAfterALook", queued)
def _(bound):
    return fault_is_raised(bound, lambda ticket: ticket.failure())
