"""``insert_tasks`` at the sizes of production: 512 slots, rows of megabytes, requests by the thousand (G9, G10, G11).

The cases are fixed rather than drawn: each size class must be met by each kind of task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from ..contract.counters import Counters
from ..slots.admission import AdmittedRequest, Request, SamplingParams
from ..slots.fields import Sizes
from ..slots.tasks import Task, TaskKind
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Kit
from .rigs.rig import Rig

MANY = Sizes(
    slots=512,
    max_tokens=96,
    block_size=4,
    max_draft=2,
    top_k=1,
    max_eos=2,
    max_stop_sequences=2,
    max_stop_length=3,
    max_bad_words=3,
)
COUNTS = (1, 8, 9, 64, 65, 257)
"""Requests of one batch: both sides of every border at which a core, a block or a table may end."""
A_CALL = 2
"""Submissions that one call may make, where its plan fits one staging block (as these do)."""


def varied(at: int, size: Sizes = MANY) -> SamplingParams:
    """Parameters that differ from request to request in every field."""
    return SamplingParams(
        temperature=0.5 + at / 1024,
        top_k=at,
        top_p=1 - at / 16384,
        min_p=at / 65536,
        seed=at * 2**33 + 7,
        repetition_penalty=1 + at / 4096,
        frequency_penalty=-at / 8192,
        presence_penalty=at / 2048,
        min_tokens=at % 3,
        max_tokens=40 + at,
        stop_sequences=tuple((at + 1,) * (1 + k) for k in range(at % 3))[: size.max_stop_sequences],
        bad_words=tuple(range(at, at + at % 4)),
        eos_token_ids=tuple(range(at, at + at % 3)),
        logprobs=None if at % 3 == 0 else at % 2,
    )


def prompt(at: int, length: int) -> list[int]:
    """Tokens that no other request has at these places."""
    return ((np.arange(length, dtype=np.int64) * 1_000_003 + at * 7919) % 2**31).tolist()


def request(rig: Rig, at: int, *, output: int = 0) -> AdmittedRequest:
    """The ``at``-th request: its length, rows and parameters depend on the number."""
    tokens = prompt(at, 1 + at % 37 + output)
    cut = len(tokens) - output
    return rig.admit(Request(rig.new_name(), tokens[:cut], varied(at % 1000), tokens[cut:]))


def blocks(size: Sizes, covered: int, at: int) -> list[int]:
    """Block ids for so many tokens; large ones among them."""
    return [(at * 131 + k * 524_287) % 2**31 for k in range(-(-covered // size.block_size))]


def prefill(rig: Rig, slot: int, admitted: AdmittedRequest, length: int = 0) -> Task:
    """A new request, all its tokens at once unless a length is given."""
    length = length or admitted.total
    return Task(TaskKind.PREFILL, slot, admitted, 0, length, blocks(rig.sizes, length, admitted.serial))


def handoff(rig: Rig, slot: int, admitted: AdmittedRequest) -> Task:
    """The decode role of a split."""
    drafts = [slot, 2**31 - 1 - slot][: slot % (rig.sizes.max_draft + 1)]
    ids = blocks(rig.sizes, admitted.total, admitted.serial)
    return Task(TaskKind.HANDOFF, slot, admitted, blocks=ids, first_token=slot * 3, drafts=drafts)


def leaving(rig: Rig, slots: Sequence[int], kind: TaskKind) -> list[Task]:
    """Those that are in these slots leave."""
    return [Task(kind, slot, rig.model.residents[slot].admitted) for slot in slots]


def filled(kit: Kit, size: Sizes = MANY) -> Rig:
    """A state with a request in every slot, some of them prefilled in part."""
    rig = Rig(kit, size)
    slots = np.random.default_rng(21).permutation(size.slots).tolist()
    admitted = [request(rig, slot) for slot in slots]
    tasks = [
        prefill(rig, slot, one, one.total // 2 if slot % 2 == 0 else 0)
        for slot, one in zip(slots, admitted, strict=True)
    ]
    arrive(rig.insert(tasks))
    return rig


def stepped(rig: Rig, turn: int) -> None:
    """One step over all slots in some order, with its output compared and every byte of the state."""
    slots = rig.sizes.slots
    order = np.random.default_rng(22 + turn).permutation(slots).tolist()
    step = rig.step(order, logprobs=1, speculative=turn % 2 == 1)
    shape = (slots, rig.sizes.max_accept, rig.sizes.top_k + 1)
    count = int(np.prod(shape))
    sampled = np.arange(slots, dtype=np.int64) * 3 + 2**32 + turn
    accepted = np.arange(slots * rig.sizes.max_accept, dtype=np.int64).reshape(slots, -1) * 5 + 2**33 + turn
    alternatives = np.arange(count, dtype=np.int64).reshape(shape) * 7
    alternatives[:, :, 0] = accepted if step.speculative else sampled[:, None]
    rig.poke(
        {
            "sampled_token_ids": sampled,
            "accept_tokens": accepted,
            "accept_num": np.arange(slots, dtype=np.int32) % rig.sizes.max_accept + 1,
            "topk_token_ids": alternatives,
            "topk_logprobs": -(np.arange(count, dtype=np.float32) + 1) / 8,
            "topk_ranks": np.arange(slots * rig.sizes.max_accept, dtype=np.int32),
        }
    )
    arrive(rig.advance(step))
    rig.check(f"a step over {slots} slots")
    rig.output(step)
    rig.check(f"the output of {slots} slots")


@guarantee(9)
def test_g09_512_slots_are_entered_left_and_stepped_at_once(kit: Kit) -> None:
    rig = filled(kit)
    rig.check("512 requests entered at once")
    stepped(rig, 0)
    slots = [*rig.model.residents]
    by = {
        turn: [slot for slot in slots if slot % 6 == turn and not rig.model.get("stop_flags", slot)]
        for turn in range(6)
    }
    tasks = leaving(rig, [*by[0], *by[1]], TaskKind.PREEMPTED) + leaving(rig, by[2], TaskKind.ABORTED)
    tasks += [prefill(rig, slot, request(rig, slot + 1000, output=2)) for slot in by[0]]
    tasks += [handoff(rig, slot, request(rig, slot + 2000)) for slot in by[2]]
    for slot in (*by[3], *by[4], *by[5]):
        resident = rig.model.residents[slot]
        more = blocks(rig.sizes, 4 * (slot % 3), slot)
        if resident.prefilled < resident.total:
            left = resident.total - resident.prefilled
            needed = -(-resident.total // rig.sizes.block_size) - resident.blocks
            ids = blocks(rig.sizes, max(0, needed) * rig.sizes.block_size, slot)
            tasks.append(Task(TaskKind.CHUNK, slot, resident.admitted, resident.prefilled, left, ids, resident.blocks))
        else:
            tasks.append(Task(TaskKind.DECODE, slot, resident.admitted, blocks=more, first_block=resident.blocks))
    kinds = {kind.name: sum(task.kind is kind for task in tasks) for kind in TaskKind}
    assert min(kinds.values()) > 64, f"the batch has too few of a kind: {kinds}"
    arrive(rig.insert(tasks))
    rig.check(f"one batch of {kinds}")
    stepped(rig, 1)


@guarantee(9)
@pytest.mark.parametrize("kind", [TaskKind.PREFILL, TaskKind.HANDOFF], ids=lambda kind: kind.name.lower())
def test_g09_batches_of_every_count_enter_and_leave(kit: Kit, kind: TaskKind) -> None:
    rig, reached = Rig(kit, MANY), Reached(map(str, COUNTS))
    make: Callable[[Rig, int, AdmittedRequest], Task] = prefill if kind is TaskKind.PREFILL else handoff
    for turn, count in enumerate(COUNTS):
        slots = np.random.default_rng(turn).permutation(MANY.slots)[:count].tolist()
        arrive(rig.insert([make(rig, slot, request(rig, slot + turn)) for slot in slots]))
        rig.check(f"{count} requests entered by {kind.name}")
        arrive(rig.insert(leaving(rig, slots, TaskKind.ABORTED if turn % 2 else TaskKind.PREEMPTED)))
        rig.check(f"{count} requests left")
        rig.output(rig.step(slots))
        reached.note(str(count))
    reached.check()


@guarantee(9)
def test_g09_slots_past_16_bits_are_their_own(kit: Kit) -> None:
    size = Sizes(66_000, 6, 4, top_k=0, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1)
    rig = Rig(kit, size)
    edges = [0, 1, 127, 128, 255, 256, 257, 32_767, 32_768, 65_535, 65_536, 65_537, 65_791, 65_792, 65_999]
    order = np.random.default_rng(23).permutation(edges).tolist()
    params = [
        replace(varied(at % 1000), stop_sequences=(), bad_words=(at,), eos_token_ids=(at,), logprobs=0) for at in order
    ]
    admitted = [
        rig.admit(Request(rig.new_name(), prompt(slot, 1 + slot % 4), param))
        for slot, param in zip(order, params, strict=True)
    ]
    arrive(rig.insert([prefill(rig, slot, one) for slot, one in zip(order, admitted, strict=True)]))
    rig.check(f"requests entered slots {order}")
    step = rig.step(order)
    rig.poke({"sampled_token_ids": np.arange(size.slots, dtype=np.int64) + 2**40})
    arrive(rig.advance(step))
    rig.check(f"a step over slots {order}")
    rig.output(step)
    gone = order[::2]
    again = rig.admit(Request(rig.new_name(), prompt(5, 5)))
    arrive(rig.insert([*leaving(rig, gone, TaskKind.PREEMPTED), prefill(rig, gone[0], again)]))
    rig.check(f"requests left slots {gone}")
    rig.output(rig.step(gone))
    rig.check(f"the output of slots {gone}")


WIDE = Sizes(
    slots=3,
    max_tokens=300_000,
    block_size=4,
    max_draft=300,
    top_k=1,
    max_eos=9000,
    max_stop_sequences=300,
    max_stop_length=300,
    max_bad_words=66_000,
)
"""Every row, and the record, longer than a number of 16 bits counts, in bytes or elements."""


def wide(rig: Rig, at: int, share: float) -> AdmittedRequest:
    """A request that fills so large a share of every row."""

    def part(most: int) -> int:
        return max(1, int(most * share))

    sizes = rig.sizes
    stops = tuple(
        tuple(prompt(at + k, 1 + (k + at) % sizes.max_stop_length)) for k in range(part(sizes.max_stop_sequences))
    )
    params = SamplingParams(
        max_tokens=2**31 - 1,
        stop_sequences=stops,
        bad_words=tuple(prompt(at + 1, part(sizes.max_bad_words))),
        eos_token_ids=tuple(prompt(at + 2, part(sizes.max_eos))),
        seed=2**63 - 1 - at,
    )
    return rig.admit(Request(rig.new_name(), prompt(at, part(sizes.max_tokens - 2)), params))


@guarantee(11)
def test_g11_rows_of_megabytes_are_written_and_reset_to_their_last_element(kit: Kit) -> None:
    rig, first = full_of_rows(kit)
    shorter = wide(rig, 2, 0.4)
    arrive(rig.insert([Task(TaskKind.ABORTED, 1, first), prefill(rig, 1, shorter)]))
    rig.check("a request of two fifths took its slot in one batch")
    tiny = rig.admit(Request(rig.new_name(), [1]))
    arrive(rig.insert([Task(TaskKind.PREEMPTED, 1, shorter), prefill(rig, 1, tiny)]))
    rig.check("a request of one token followed it")


@guarantee(9)
def test_g09_rows_of_megabytes_are_written_to_their_last_element(kit: Kit) -> None:
    rig, first = full_of_rows(kit)
    one, other = wide(rig, 3, 0.7), rig.admit(Request(rig.new_name(), [5]))
    handed = Task(TaskKind.HANDOFF, 2, one, blocks=blocks(WIDE, one.total, 3), first_token=4, drafts=prompt(9, 300))
    arrive(rig.insert([handed, prefill(rig, 0, other)]))
    rig.check("a long handoff with 300 drafts, and a short request beside it")
    arrive(rig.insert([Task(TaskKind.PREEMPTED, 2, one), Task(TaskKind.ABORTED, 1, first)]))
    rig.check("both long requests left")


def full_of_rows(kit: Kit) -> tuple[Rig, AdmittedRequest]:
    """A state with a request in slot 1 that fills every row, and the request."""
    rig = Rig(kit, WIDE)
    reached = Reached(
        f"{what} past 16 bits" for what in ("tokens", "blocks", "bad words", "stop tokens", "record bytes")
    )
    first = wide(rig, 1, 1.0)
    task = prefill(rig, 1, first)
    arrive(rig.insert([task]))
    rig.check("a request that fills every row")
    record = rig.state.layout.record_dtype.itemsize
    lengths = zip(
        reached.counts, (first.total, len(task.blocks), first.extents[0], first.extents[2], record), strict=True
    )
    for what, length in lengths:
        if length > 0xFFFF:
            reached.note(what)
    reached.check()
    return rig, first


EARLY = {"quick": 3000, "default": 20_000, "nightly": 70_000}
"""Requests that are admitted before the first of them is inserted."""


@guarantee(9)
def test_g09_requests_admitted_by_the_thousand_are_inserted_late(kit: Kit) -> None:
    size = replace(MANY, slots=64, max_tokens=24)
    rig, other = Rig(kit, size), Rig(kit, size, name="another")
    params = [varied(at, size) for at in range(97)]
    made: list[AdmittedRequest] = []
    for at in range(EARLY[kit.effort.profile]):
        one = Request(rig.new_name(), [at, at // 7, 2**31 - 1 - at][: 1 + at % 3], params[at % 97])
        made.append(rig.admit(one))
        other.model.requests[made[-1].serial] = one
    middle = len(made) // 2
    parts = {
        "the first": made[:64],
        "the last": made[:-65:-1],
        "those between": made[middle : middle + 64],
        "first and last": [*made[64:96], *made[-96:-64]],
    }
    for what, chosen in parts.items():
        arrive(rig.insert([prefill(rig, slot, one) for slot, one in enumerate(chosen)]))
        rig.check(f"{what} of {len(made)} admitted requests entered")
        arrive(rig.insert(leaving(rig, range(64), TaskKind.ABORTED)))
        rig.output(rig.step(range(64)))
    for at in (200, len(made) - 200, 201):  # by themselves too: a core may treat a few requests its own way
        arrive(rig.insert([prefill(rig, at % 64, made[at])]))
    rig.check("single requests entered late")
    rest = made[300:364]
    arrive(other.insert([prefill(other, slot, one) for slot, one in enumerate(rest)]))
    other.check("requests that were admitted for another state of the same sizes entered late")
    rig.check("the other state's requests entered")


@guarantee(9)
def test_g09_what_was_inserted_is_kept_while_thousands_more_are_admitted(kit: Kit) -> None:
    size = replace(MANY, slots=80, max_tokens=48)
    rig = Rig(kit, size)
    with kit.held(rig.stream):
        tickets = []
        for low in (0, 8, 9):  # a few, one, and many: each may be staged in its own way
            high = {0: 8, 8: 9, 9: 80}[low]
            tickets.append(rig.insert([prefill(rig, slot, request(rig, slot)) for slot in range(low, high)]))
        for at in range(EARLY["quick"] // 2):
            rig.state.admit(Request(f"later-{at}", prompt(at, 1 + at % 40)))  # dropped at once
    for ticket in tickets:
        arrive(ticket)
    rig.check("thousands of requests were admitted before the insertion was carried out")


@guarantee(9)
def test_g09_block_ids_may_be_changed_once_the_call_has_returned(kit: Kit) -> None:
    rig = Rig(kit, replace(MANY, slots=80, max_tokens=4096))
    tasks, lent = [], []
    for slot in range(80):
        task = prefill(rig, slot, rig.admit(Request(rig.new_name(), prompt(slot, 3000 + slot))))
        lent.append(np.array(task.blocks, np.int32))
        tasks.append(replace(task, blocks=cast(Sequence[int], lent[-1])))
    with kit.held(rig.stream):
        tickets = [rig.insert(tasks[:3]), rig.insert(tasks[3:])]
        for ids in lent:
            ids[...] = -77
    for ticket in tickets:
        arrive(ticket)
    rig.check("the callers' block ids were overwritten")


# -- what it costs ----------------------------------------------------------------------------------------------------


def cost(rig: Rig, tasks: Sequence[Task], what: str) -> Counters:
    """What an insertion costs by the device's own counters, which must have counted something."""
    __tracebackhide__ = True
    before = rig.bound.counters()
    ticket = rig.insert(tasks)
    spent = rig.bound.counters() - before
    arrive(ticket)
    later = rig.bound.counters() - before
    assert spent.submissions >= 1, (
        f"{what} wrote to the device, but counters() tells of {spent.submissions} submissions"
    )
    assert spent.submissions <= A_CALL, f"{what}: {spent.submissions} submissions, but at most {A_CALL} are due"
    assert spent.uploads + spent.launches == spent.submissions, (
        f"{what}: {spent.uploads} uploads and {spent.launches} launches are not {spent.submissions} submissions"
    )
    assert spent.host_waits == 0, f"{what}: the host waited {spent.host_waits} times for the device"
    assert later.submissions == spent.submissions, (
        f"{what}: {later.submissions - spent.submissions} submissions came late"
    )
    return spent


@guarantee(10, requires="fused_scatter")
def test_g10_every_kind_of_batch_is_counted_and_none_costs_more_when_it_is_large(kit: Kit) -> None:
    rig, reached = Rig(kit, MANY), Reached(kind.name for kind in TaskKind)
    for turn, count in enumerate((1, 9, 130)):
        slots = np.random.default_rng(turn).permutation(MANY.slots)[:count].tolist()
        entering = [request(rig, slot) for slot in slots]
        halves = [prefill(rig, slot, one, max(1, one.total // 2)) for slot, one in zip(slots, entering, strict=True)]
        cost(rig, halves, f"{count} requests entering")
        chunks = [
            Task(TaskKind.CHUNK, slot, one, half.length, one.total - half.length,
                 blocks(MANY, 4 * (-(-one.total // 4) - len(half.blocks)), slot), len(half.blocks))
            for slot, one, half in zip(slots, entering, halves, strict=True) if one.total > half.length
        ]  # fmt: skip
        arrive(rig.poke({"seq_lens_this_time": np.zeros(MANY.slots), "seq_lens_encoder": np.zeros(MANY.slots)}))
        if chunks:
            cost(rig, chunks, f"{len(chunks)} chunks")
        going = [Task(TaskKind.DECODE, slot, rig.model.residents[slot].admitted, blocks=[1, 2],
                      first_block=rig.model.residents[slot].blocks) for slot in slots]  # fmt: skip
        cost(rig, going, f"{count} requests with more blocks")
        kind = TaskKind.PREEMPTED if turn % 2 else TaskKind.ABORTED
        cost(rig, leaving(rig, slots, kind), f"{count} requests leaving")
        rig.output(rig.step(slots))
        cost(rig, [handoff(rig, slot, request(rig, slot)) for slot in slots], f"{count} handoffs")
        kind = TaskKind.ABORTED if turn % 2 else TaskKind.PREEMPTED
        mixed = [*leaving(rig, slots, kind), *(prefill(rig, slot, request(rig, slot + 1)) for slot in slots)]
        cost(rig, mixed, f"{count} requests leaving and as many entering")
        cost(
            rig,
            leaving(rig, slots, TaskKind.ABORTED if kind is TaskKind.PREEMPTED else TaskKind.PREEMPTED),
            "all leave",
        )
        rig.output(rig.step(slots))
        for task in (*halves, *chunks, *going, *mixed):
            reached.note(task.kind.name)
        reached.note("HANDOFF")
        rig.check(f"batches of {count}")
    reached.check()


@guarantee(10, requires=("fused_scatter", "async_h2d", "can_hold_stream"))
def test_g10_a_large_insertion_does_not_wait_for_the_device(kit: Kit) -> None:
    rig = Rig(kit, MANY)
    tasks = [prefill(rig, slot, request(rig, slot)) for slot in range(512)]
    with kit.held(rig.stream):
        before = rig.bound.counters()
        tickets = [rig.insert(tasks[low:high]) for low, high in ((0, 1), (1, 66), (66, 512))]
        waited = (rig.bound.counters() - before).host_waits
        done = [ticket.done() for ticket in tickets]
    assert not waited, f"the host waited {waited} times for the device"
    assert not any(done), f"tickets answer done={done} while their stream is held"
    for ticket in tickets:
        arrive(ticket)
    rig.check("512 requests entered on a held stream")
