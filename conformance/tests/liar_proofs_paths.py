"""Proofs that the liars of paths lie."""

from dataclasses import replace

import numpy as np
from hal_core.errors import InvalidBatch
from hal_core.output.records import SlotStatus
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request
from hal_core.slots.declared import StateField
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from liar_proofs import PATIENCE, column, cpu, insert, prefill, proof, raw, state_of, update, write


@proof("OneProblemATask", cpu)
def both_listed(bound):
    """Whether two problems of one task are two."""
    state = state_of(bound, 1)
    try:
        insert(bound, state, [replace(prefill(state, 0), first_block=1, first_token=3)])
    except InvalidBatch as error:
        return len(error.problems) == 2
    return False


@proof("DeclaredLongsAreInts", cpu)
def long_kept(bound):
    """Whether a declared int64 has its high word."""
    fields = [StateField("far", "int64", value=lambda request: 2**40 + 1)]
    state = bound.state(StateConfig(num_slots=1, max_model_len=16), fields=fields)
    insert(bound, state, [prefill(state, 0)])
    return column(state, "far")[0, 0] == 2**40 + 1


@proof("TargetsLengths", cpu)
def companion_reset(bound):
    """Whether the blocks of a former request are gone from its companion's slot, which is not the target's."""
    state = bound.state(StateConfig(num_slots=2, max_model_len=32, block_size=4), beside=["other"])
    long = prefill(state, 0, range(8))
    insert(bound, state, [long])
    slot = state.companions[0].host_table.live[long.request.admission_id]
    insert(bound, state, [Task(TaskKind.ABORTED, 0, long.request)])
    insert(bound, state, [prefill(state, 1)])
    place = state.companions[0].layout.fields["block_tables"]
    row = raw(state.memory)[place.offset + slot * place.stride :][:8].view(np.int32)
    return slot == 1 and row[1] == -1


def saved(bound, state, step, sink):
    write(bound, state.view("sampled_token_ids"), 5).wait(PATIENCE)
    update(bound, state, step).wait(PATIENCE)
    return bound.save_output(state=state, step=step, sink=sink, stream=bound.default_stream)


@proof("MirrorFollowsTheSink", cpu)
def mirror_untouched(bound):
    """Whether the mirror is as it was before the worker takes the output that the sink has read."""
    state, sink = state_of(bound, 1), MemorySink()
    insert(bound, state, [prefill(state, 0)])
    saved(bound, state, Step(1, {state.name: [0]}), sink)
    return len(sink.records) == 1 and state.mirror["step_idx"][0, 0] == 0


@proof("ToldUnderItsNameOnce", cpu)
def both_told(bound):
    """Whether a request that was preempted and continues in its slot is reported twice."""
    state, sink = state_of(bound, 1), MemorySink()
    first = prefill(state, 0)
    insert(bound, state, [first])
    again = state.admit(Request(first.request.request_id, [1, 2]))
    insert(bound, state, [Task(TaskKind.PREEMPTED, 0, first.request), replace(first, request=again)])
    saved(bound, state, Step(1, {state.name: [0]}), sink)
    return sink.records[0].status.tolist() == [SlotStatus.PREEMPTED, SlotStatus.TOKEN]


@proof("FirstTokensAreChecked", cpu)
def second_checked(bound):
    """Whether a second token outside the vocabulary is an error of its request."""
    state, sink = state_of(bound, 1, max_draft_tokens=1, vocab_size=9), MemorySink()
    insert(bound, state, [prefill(state, 0, max_tokens=9)])
    write(bound, state.view("accept_tokens"), [[5, 9]]).wait(PATIENCE)
    write(bound, state.view("accept_num"), 2).wait(PATIENCE)
    saved(bound, state, Step(1, {state.name: [0]}, speculative=True), sink)
    return sink.records[0].status.tolist() == [SlotStatus.ERROR]
