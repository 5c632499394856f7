"""Proofs that the liars of the fifth and sixth set lie."""

import gc

import numpy as np
from hal_conformance.harness.sinks import KeepingSink
from hal_core.errors import GroupLost, InvalidValue, OutOfMemory, TicketTimeout
from hal_core.group import Group
from hal_core.memory.writes import Writes
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.step import Step
from hal_core.tickets import PromiseTicket
from liar_proofs import (
    A_WHILE,
    PATIENCE,
    RING,
    column,
    cpu,
    fill,
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


@proof("FreesByTheDefaultStream", queued)
def freed_after_its_readers(bound):
    """Whether a dropped value's memory is the device's while another stream reads it."""
    device, stream, target = bound.device, bound.device.stream(), poisoned(bound, 64)
    value = poisoned(bound, 64)
    address, blocks = value.address, device.primitives.memory
    block = blocks[address]  # held here, so that a liar's copy reads memory that is still there
    with device.hold_stream(stream):
        ticket = write(bound, flat(target, 0, 64), flat(value, 0, 64), stream)
        del value
        gc.collect()
        device.allocate(64)
        kept = blocks.get(address) is block
    ticket.wait(PATIENCE)
    return kept


@proof("LimitAsksDefaultStream", pressed())
def refused_while_its_stream_is_held(bound):
    """Whether a value above the limit is refused while a stream beside the default one is held."""
    bound.device.value_limit, memory, stream = RING, poisoned(bound, 3 * RING), bound.device.stream()
    with bound.device.hold_stream(stream):
        return raises(OutOfMemory, lambda: write(bound, flat(memory, 0, 3 * RING), np.ones(3 * RING, np.uint8), stream))


@proof("DropsFencesAtTheDeadline", pressed())
def refused_twice(bound):
    """Whether a ring that is full after a refusal refuses again, and its values arrive."""
    with bound.device.hold_stream(bound.default_stream):
        memory, more, refused = fill(bound, bound.default_stream), poisoned(bound, RING // 4), []
        for _ in range(2):
            value = np.zeros(RING // 4, np.uint8)
            refused.append(raises(OutOfMemory, lambda value=value: write(bound, flat(more, 0, RING // 4), value)))
    bound.default_stream.synchronize(PATIENCE)
    return all(refused) and (raw(memory) == 1).all()


@proof("WindowsAreWritten", cpu)
def windows_refused(bound):
    """Whether a target of sliding windows is refused."""
    windows = np.lib.stride_tricks.as_strided(np.zeros(8, np.int64), (6, 3), (8, 8))
    return raises(InvalidValue, lambda: write(bound, windows, np.arange(18).reshape(6, 3)))


@proof("CachesViewsWithoutStrides", cpu)
def strided_after_plain(bound):
    """Whether every second slot is written after the first half was."""
    state = state_of(bound, 4)
    view = state.view("next_tokens")
    write(bound, view, 0)
    write(bound, view[:2], np.array([[1], [2]]))
    write(bound, view[::2], np.array([[3], [4]]))
    return column(state, "next_tokens")[:, 0].tolist() == [3, 2, 4, 0]


@proof("PostponesStridedArrays", cpu)
def strided_on_return(bound):
    """Whether a tensor has an array in every second element when the call returns."""
    tensor = np.zeros(6, np.int64)
    write(bound, tensor[::2], np.array([1, 2, 3]))
    return tensor.tolist() == [1, 0, 2, 0, 3, 0]


def outputs(bound, state, sink, step, tokens, **more):
    """Run a step that samples these tokens, and return its output's ticket."""
    write(bound, state.view("sampled_token_ids"), tokens).wait(PATIENCE)
    update(bound, state, step).wait(PATIENCE)
    return bound.save_output(state=state, step=step, sink=sink, stream=bound.default_stream, **more)


@proof("MirrorIsUsedAgain", queued)
def mirror_of_the_taken(bound):
    """Whether the mirror stays that of the step taken last, when a later output was copied."""
    state, sink = state_of(bound, 1), MemorySink()
    insert(bound, state, [prefill(state, 0)])
    ticket = outputs(bound, state, sink, step_of(state, 1, [0]), 11)
    ticket.record(PATIENCE)
    state.take(ticket)
    del ticket
    gc.collect()
    before = state.mirror["sampled_token_ids"].copy()
    later = outputs(bound, state, sink, step_of(state, 2, [0]), 12)
    later.record(PATIENCE)
    return (state.mirror["sampled_token_ids"] == before).all()


class Losing:
    """The collectives of a group whose broadcasts are lost after the first."""

    sent = 0

    def exchange(self, block):
        return {0: block, 1: block}

    def broadcast(self, memory, part, stream):
        self.sent += 1
        ticket = PromiseTicket("sync")
        ticket.complete(GroupLost("rank 1 is gone", cure="start it again") if self.sent > 1 else None)
        return ticket

    def close(self):
        pass


@proof("LogprobsAreUnchecked", cpu)
def nothing_of_a_lost_step(bound):
    """Whether no record is sent of a step with log-probabilities whose broadcast was lost."""
    group, state, sink = Group((0, 1), 0), state_of(bound, 1, max_logprobs=1), MemorySink()
    bound.device._communicators[group.ranks] = Losing()
    insert(bound, state, [prefill(state, 0)])
    write(bound, state.view("topk_token_ids"), np.array([[5, 1]])).wait(PATIENCE)
    for number in (1, 2):
        step = Step(number, {state.name: np.array([0], np.int32)}, group=group, logprobs=1)
        sent = bound.broadcast_tokens(state=state, group=group, stream=bound.default_stream)
        sent.observed = True
        raises(GroupLost, lambda step=step: outputs(bound, state, sink, step, 5).wait(PATIENCE))
    return len(sink.records) == 1


@proof("FailureIsForgotten", cpu)
def no_tokens_after_a_failure(bound):
    """Whether a request that got a token outside the vocabulary gets none in the records after."""
    state, sink = state_of(bound, 1, vocab_size=100), MemorySink()
    insert(bound, state, [prefill(state, 0)])
    told = []
    for number, token in enumerate((11, 500, 12, 13, 14)):
        ticket = outputs(bound, state, sink, step_of(state, number, [0]), token)
        told += [int(status) for record in sink.records[number:] for status in record.status]
        ticket.observed = True
    return told[1] == SlotStatus.ERROR and not any(told[2:])


@proof("LogprobsStallStream", queued)
def later_work_beside_a_copy(bound):
    """Whether other work ends while a copy with log-probabilities is held."""
    state, stream, memory = state_of(bound, 1, max_logprobs=1), bound.default_stream, poisoned(bound, 8)
    insert(bound, state, [prefill(state, 0)])
    step, sink = Step(1, {state.name: np.array([0], np.int32)}, logprobs=1), KeepingSink()
    write(bound, state.view("topk_token_ids"), np.array([[5, 1]])).wait(PATIENCE)
    with bound.device.hold_stream(stream.beside):
        outputs(bound, state, sink, step, 5)
        return not raises(TicketTimeout, lambda: write(bound, flat(memory, 0, 8), 1).wait(1.0))


@proof("JoinedOnce", queued)
def waits_each_time(bound):
    """Whether an insertion waits for the second step of a stream as for the first."""
    state, steps, other, waited = state_of(bound, 2), bound.device.stream(), bound.device.stream(), []
    insert(bound, state, [prefill(state, 0)])
    for number in (1, 2):
        with bound.device.hold_stream(steps):
            update(bound, state, step_of(state, number, [0]), steps)
            ticket = write(bound, state.view("next_tokens"), 1, other)
            waited.append(raises(TicketTimeout, lambda ticket=ticket: ticket.wait(A_WHILE)))
        ticket.wait(PATIENCE)
        steps.synchronize(PATIENCE)
    return all(waited)


@proof("FirstOwnerWaits", queued)
def waits_for_the_second(bound):
    """Whether a write to memory and then to a state waits for the step that reads the state."""
    state, steps, other, memory = state_of(bound, 1), bound.device.stream(), bound.device.stream(), poisoned(bound, 8)
    insert(bound, state, [prefill(state, 0)])
    with bound.device.hold_stream(steps):
        update(bound, state, step_of(state, 1, [0]), steps)
        writes = Writes()
        writes.set(flat(memory, 0, 8), 5)
        writes.set(state.view("next_tokens")[0], 9)
        ticket = bound.write(writes=writes, stream=other)
        return raises(TicketTimeout, lambda: ticket.wait(A_WHILE))
