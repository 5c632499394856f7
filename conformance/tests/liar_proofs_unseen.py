"""Proofs that the liars of the fourth set lie."""

from threading import Thread

import numpy as np
from hal_conformance.harness.sinks import KeepingSink
from hal_core.errors import OutOfMemory, TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.output.sinks import MemorySink
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    RING,
    column,
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


@proof("ReadOnlyIsBorrowed", queued)
def read_only_taken(bound):
    """Whether the bytes under a read-only view are read by the call."""
    memory, owned = poisoned(bound, 64), np.ones(64, np.uint8)
    value = owned[:]
    value.flags.writeable = False
    with bound.device.hold_stream(bound.default_stream):
        ticket = write(bound, flat(memory, 0, 64), value)
        owned[...] = 9
    ticket.wait(PATIENCE)
    return (raw(memory)[:64] == 1).all()


@proof("EventOfLastWork", queued)
def event_behind_a_wait(bound):
    """Whether an event comes after what its stream waits for since its last work."""
    stream, other = bound.device.stream(), bound.device.stream()
    write(bound, flat(poisoned(bound, 8), 0, 8), 1, stream).wait(PATIENCE)
    with bound.device.hold_stream(other):
        stream.wait(other.record())
        return not bound.device.event(stream).done()


@proof("NoStrideIsContiguous", queued)
def one_element(bound):
    """Whether a device value of stride 0 is one element."""
    memory = poisoned(bound, 16)
    raw(memory)[:8] = np.arange(8)
    write(bound, flat(memory, 8, 4), View(memory, 1, (4,), (0,), dtype_of("uint8"))).wait(PATIENCE)
    return raw(memory)[8:12].tolist() == [1] * 4


@proof("MoreBlocksAreNotBooked", cpu)
def added_blocks_reset(bound):
    """Whether a block that a request got later is gone from the next one's row."""
    state = state_of(bound, 1, tokens=32, block_size=4)
    first = prefill(state, 0)
    insert(bound, state, [first])
    insert(bound, state, [Task(TaskKind.MORE_BLOCKS, 0, first.request, blocks=[7], first_block=1)])
    state.release([0])
    insert(bound, state, [prefill(state, 0)])
    return column(state, "block_tables")[0, 1] == -1


@proof("SlotsOfTheOrdersAreKept", cpu)
def names_of_now(bound):
    """Whether a step with the orders of an earlier one names the request that is in the slot now."""
    state = state_of(bound, 1)
    first = step_of(state, 1, [0])
    for step in (first, first.again(2)):
        state.release([0])
        task = prefill(state, 0)
        insert(bound, state, [task])
        write(bound, state.view("sampled_token_ids"), 5).wait(PATIENCE)
        update(bound, state, step).wait(PATIENCE)
        sink = MemorySink()
        ticket = bound.save_output(state=state, step=step, sink=sink, stream=bound.default_stream)
    return ticket.failure() is None and ticket.record().counts.tolist() == [1]


@proof("LogprobsOnTheDefaultStream", queued)
def copied_after_the_step(bound):
    """Whether output with log-probabilities waits for its step, on a held stream beside the default one."""
    state, stream, sink = state_of(bound, 1, max_logprobs=1), bound.device.stream(), KeepingSink()
    insert(bound, state, [prefill(state, 0)])
    step = Step(1, {state.name: np.array([0], np.int32)}, logprobs=1)
    with bound.device.hold_stream(stream):
        update(bound, state, step, stream)
        ticket = bound.save_output(state=state, step=step, sink=sink, stream=stream)
        return raises(TicketTimeout, lambda: ticket.record(A_WHILE))


@proof("LimitOfValuesIsIgnored", pressed())
def refused_above_the_limit(bound):
    """Whether a value above the limit is refused while its stream is held."""
    bound.device.value_limit, memory, stream = RING, poisoned(bound, 3 * RING), bound.default_stream
    with bound.device.hold_stream(stream):
        return raises(OutOfMemory, lambda: write(bound, flat(memory, 0, 3 * RING), np.ones(3 * RING, np.uint8)))


@proof("ZerosRunBeside", queued)
def filled_before_the_next_write(bound):
    """Whether a large fill waits for nothing but its own stream."""
    memory, stream = poisoned(bound, 1 << 16), bound.default_stream
    with bound.device.hold_stream(stream.beside):
        write(bound, flat(memory, 0, 1 << 16), 0)
        last = write(bound, flat(memory, 0, 8), 1)
        last.wait(PATIENCE)
    stream.beside.synchronize(PATIENCE)
    return (raw(memory)[:8] == 1).all()


@proof("CloseWaitsForOneStream", queued)
def closed_after_its_work(bound):
    """Whether close() waits for a stream that is not the default one."""
    stream, memory, closing = bound.device.stream(), poisoned(bound, 16), Thread(target=bound.close)
    with bound.device.hold_stream(stream):
        ticket = write(bound, flat(memory, 0, 8), flat(memory, 8, 8), stream)
        closing.start()
        closing.join(A_WHILE)
        waits = closing.is_alive()
    closing.join(PATIENCE)
    ticket.wait(PATIENCE)  # of a liar: until here its work uses this memory
    return waits
