"""``insert_tasks`` at the sizes of production: 512 slots, slot numbers past 16 bits, rows of megabytes (G8, G9, G11);
``save_output`` of thousands of slots (G18).

The cases are fixed rather than drawn: each size class must occur with each kind of task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hal_core.errors import OutOfMemory, TicketTimeout
from hal_core.group import ALONE, Group
from hal_core.memory.views import ByteRange
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import AdmittedRequest, Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind
from msgspec import structs

from .fixtures.many import MANY, blocks, filled, handoff, prefill, prompt, request, stepped, varied
from .fixtures.sizes import GREAT, need, sizes
from .fixtures.world import FOLLOWER, World, assert_rows
from .harness import backdoor
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.reached import Reached
from .kit import Kit
from .liars import faults
from .test_faults import attempt, under
from .test_vendor_mistakes import another

WRITES = 6
"""More writes than an insertion makes."""
REFUSED = (65, 257)
"""Requests of a batch that is refused."""


@guarantee(9, also=(11, 12, 19, 20, 22, 24))
def test_g09_512_slots_are_entered_left_and_stepped_at_once(kit: Kit) -> None:
    fixture = filled(kit)
    fixture.check("512 requests entered at once")
    stepped(fixture, 0)
    slots = [*fixture.model.residents]
    by = {
        turn: [slot for slot in slots if slot % 6 == turn and not fixture.model.get("stop_flags", slot)]
        for turn in range(6)
    }
    tasks = fixture.leaving([*by[0], *by[1]], TaskKind.PREEMPTED) + fixture.leaving(by[2], TaskKind.ABORTED)
    tasks += [prefill(fixture, slot, request(fixture, slot + 1000, output=2)) for slot in by[0]]
    tasks += [handoff(fixture, slot, request(fixture, slot + 2000)) for slot in by[2]]
    for slot in (*by[3], *by[4], *by[5]):
        resident = fixture.model.residents[slot]
        more = blocks(fixture.sizes, 4 * (slot % 3), slot)
        if resident.prefilled < resident.total:
            left = resident.total - resident.prefilled
            needed = -(-resident.total // fixture.sizes.block_size) - resident.blocks
            ids = blocks(fixture.sizes, max(0, needed) * fixture.sizes.block_size, slot)
            tasks.append(
                Task(TaskKind.PREFILL_CHUNK, slot, resident.admitted, resident.prefilled, left, ids, resident.blocks)
            )
        else:
            tasks.append(Task(TaskKind.MORE_BLOCKS, slot, resident.admitted, blocks=more, first_block=resident.blocks))
    kinds = {kind.name: sum(task.kind is kind for task in tasks) for kind in TaskKind}
    assert min(kinds.values()) > 64, f"the batch has too few of a kind: {kinds}"
    fixture.enter(tasks)
    fixture.check(f"one batch of {kinds}")
    stepped(fixture, 1)


@guarantee(9, also=(11, 12, 18, 19, 20))
@pytest.mark.parametrize("kind", [TaskKind.PREFILL, TaskKind.REMOTE_PREFILL], ids=lambda kind: kind.name.lower())
def test_g09_batches_of_every_count_enter_and_leave(kit: Kit, kind: TaskKind) -> None:
    """Both sides of every border at which a core, a block or a table may end."""
    counts = sizes(kit, "requests of a batch")
    fixture, reached = World(kit, replace(MANY, num_slots=max(counts) + 3)), Reached(map(str, counts))
    make: Callable[[World, int, AdmittedRequest], Task] = prefill if kind is TaskKind.PREFILL else handoff
    for turn, count in enumerate(counts):
        slots = np.random.default_rng(turn).permutation(fixture.sizes.num_slots)[:count].tolist()
        fixture.enter([make(fixture, slot, request(fixture, slot + turn)) for slot in slots])
        fixture.check(f"{count} requests entered by {kind.name}")
        fixture.enter(fixture.leaving(slots, TaskKind.ABORTED if turn % 2 else TaskKind.PREEMPTED))
        fixture.check(f"{count} requests left")
        fixture.output(fixture.step(slots))
        reached.note(str(count))
    reached.check()


@guarantee(9, also=(11, 18, 19, 20))
def test_g09_a_batch_of_thousands_reaches_its_last_request(kit: Kit) -> None:
    """All of them in one insertion, and all of them leave in one in which others enter."""
    counts = sizes(kit, "requests of one large batch")
    fixture, params = World(kit, replace(THOUSANDS, num_slots=max(counts) + 3)), SamplingParams(max_tokens=3)
    gone: list[Task] = []
    for turn, count in enumerate((*counts, 65)):
        slots = np.random.default_rng(turn).permutation(fixture.sizes.num_slots)[:count].tolist()
        admitted = [fixture.admit(Request(fixture.new_name(), [slot + 1], params)) for slot in slots]
        entering = [Task(TaskKind.PREFILL, *each, 0, 1, [each[0]]) for each in zip(slots, admitted, strict=True)]
        fixture.enter([*gone, *entering])
        fixture.check(f"{count} requests entered in one batch, where {len(gone)} left")
        gone = fixture.leaving(slots, TaskKind.ABORTED if turn % 2 else TaskKind.PREEMPTED)
        fixture.output(fixture.step(slots))


@guarantee(9, also=(12, 24, 25))
def test_g09_steps_far_into_a_request_write_where_it_is(kit: Kit) -> None:
    """Both sides of the bits at which a token's place may be cut, plain and speculative, beside a short request."""
    for length in sizes(kit, "tokens before a step"):
        size = StateConfig(2, length + 16, 1 << 20, max_draft_tokens=2, max_logprobs=0)
        fixture, what = World(kit, size), f"a request of {length} tokens"
        fixture.enter(
            fixture.entering(slot, range(1, 1 + tokens), blocks=[0, 1][: -(-tokens >> 20)], max_tokens=15)
            for slot, tokens in enumerate((length - 2, 3))
        )
        for turn in range(4):
            ids = np.arange(2 * 3, dtype=np.int64).reshape(2, 3, 1) + 10 * turn + 70
            fixture.sample(ids, [3, 2], turn=turn)
            fixture.output(fixture.advance([1, 0], speculative=turn % 2 == 1))
            fixture.check(f"step {turn} of {what}")


@guarantee(9, also=(18, 19, 20))
def test_g09_slots_past_16_bits_are_their_own(kit: Kit) -> None:
    size = StateConfig(
        66_000, 6, 4, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1
    )
    fixture = World(kit, size)
    edges = [0, 1, 127, 128, 255, 256, 257, 32_767, 32_768, 65_535, 65_536, 65_537, 65_791, 65_792, 65_999]
    order = np.random.default_rng(23).permutation(edges).tolist()
    params = [
        replace(varied(at % 1000), stop_sequences=(), bad_words=(at,), eos_token_ids=(at,), logprobs=0) for at in order
    ]
    admitted = [
        fixture.admit(Request(fixture.new_name(), prompt(slot, 1 + slot % 4), param))
        for slot, param in zip(order, params, strict=True)
    ]
    fixture.enter([prefill(fixture, slot, one) for slot, one in zip(order, admitted, strict=True)])
    fixture.check(f"requests entered slots {order}")
    step = fixture.step(order)
    fixture.poke({"sampled_token_ids": np.arange(size.num_slots, dtype=np.int64) + 2**40})
    fixture.run(step)
    fixture.check(f"a step over slots {order}")
    fixture.output(step)
    gone = order[::2]
    again = fixture.admit(Request(fixture.new_name(), prompt(5, 5)))
    fixture.enter([*fixture.leaving(gone, TaskKind.PREEMPTED), prefill(fixture, gone[0], again)])
    fixture.check(f"requests left slots {gone}")
    fixture.output(fixture.step(gone))
    fixture.check(f"the output of slots {gone}")


WIDE = StateConfig(
    num_slots=3,
    max_model_len=300_000,
    block_size=4,
    max_draft_tokens=300,
    max_logprobs=1,
    max_eos=9000,
    max_stop_sequences=300,
    max_stop_length=300,
    max_bad_words=66_000,
)
"""Every row, and the record, longer than a 16-bit number can count, in bytes or elements."""


def wide(fixture: World, at: int, share: float) -> AdmittedRequest:
    """Return a request that fills so large a share of every row."""

    def part(most: int) -> int:
        return max(1, int(most * share))

    sizes = fixture.sizes
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
    return fixture.admit(Request(fixture.new_name(), prompt(at, part(sizes.max_model_len - 2)), params))


@guarantee(11)
def test_g11_rows_of_megabytes_are_written_and_reset_to_their_last_element(kit: Kit) -> None:
    fixture, first = full_of_rows(kit)
    shorter = wide(fixture, 2, 0.4)
    fixture.enter([Task(TaskKind.ABORTED, 1, first), prefill(fixture, 1, shorter)])
    fixture.check("a request of two fifths took its slot in one batch")
    tiny = fixture.admit(Request(fixture.new_name(), [1]))
    fixture.enter([Task(TaskKind.PREEMPTED, 1, shorter), prefill(fixture, 1, tiny)])
    fixture.check("a request of one token followed it")


@guarantee(9)
def test_g09_rows_of_megabytes_are_written_to_their_last_element(kit: Kit) -> None:
    fixture, first = full_of_rows(kit)
    one, other = wide(fixture, 3, 0.7), fixture.admit(Request(fixture.new_name(), [5]))
    ids = blocks(WIDE, one.total, 3)
    handed = Task(TaskKind.REMOTE_PREFILL, 2, one, one.total, 0, ids, first_token=4, drafts=prompt(9, 300))
    fixture.enter([handed, prefill(fixture, 0, other)])
    fixture.check("a long handoff with 300 drafts, and a short request beside it")
    fixture.enter([Task(TaskKind.PREEMPTED, 2, one), Task(TaskKind.ABORTED, 1, first)])
    fixture.check("both long requests left")


def full_of_rows(kit: Kit) -> tuple[World, AdmittedRequest]:
    """Return a state with a request in slot 1 that fills every row, and the request."""
    fixture = World(kit, WIDE)
    reached = Reached(
        f"{what} past 16 bits" for what in ("tokens", "blocks", "bad words", "stop tokens", "record bytes")
    )
    first = wide(fixture, 1, 1.0)
    task = prefill(fixture, 1, first)
    fixture.enter([task])
    fixture.check("a request that fills every row")
    record = fixture.state.layout.record_dtype.itemsize
    lengths = zip(
        reached.counts, (first.total, len(task.blocks), first.row_lengths[0], first.row_lengths[2], record), strict=True
    )
    for what, length in lengths:
        if length > 0xFFFF:
            reached.note(what)
    reached.check()
    return fixture, first


@guarantee(8)
@pytest.mark.parametrize("count", REFUSED)
def test_g08_a_large_batch_whose_write_fails_changes_no_slot(kit: Kit, count: int) -> None:
    """Whichever of the device's writes fails: a batch has no part that is written before another may be refused."""
    with under(kit, faults.FailingWrites) as (laid, fuse):
        fixture = World(laid, MANY)
        slots = np.random.default_rng(count).permutation(MANY.num_slots)[:count].tolist()
        fixture.enter([prefill(fixture, slot, request(fixture, slot)) for slot in slots])
        batch = fixture.leaving(slots, TaskKind.ABORTED)
        batch += [prefill(fixture, slot, request(fixture, slot + 1000)) for slot in slots]
        met = 0
        for fuse.at in range(1, WRITES + 1):
            error = attempt(lambda: fixture.bound.insert_tasks(state=fixture.state, tasks=batch, stream=fixture.stream))
            if error is None:
                break
            met += 1
            fixture.check(f"{count} requests whose write {met} was refused")
        assert met, "insert_tasks makes no write that can fail"
        assert met < WRITES, f"insert_tasks of {count} requests makes {WRITES} writes or more"
        fuse.at = 0
        fixture.model.insert(batch)
        fixture.check(f"{count} requests, after {met} refusals")


VAST = StateConfig(
    num_slots=9,
    max_model_len=33_600_000,
    block_size=1 << 20,
    max_draft_tokens=2,
    max_logprobs=1,
    max_stop_sequences=1,
    max_stop_length=2,
)
"""269 MB of tokens a slot: the last one's row, and every field behind them, lie past 2 GiB."""
SAMPLED = ("sampled_token_ids", "accept_tokens", "accept_num", "topk_token_ids", "topk_logprobs", "topk_ranks")


@guarantee(9, also=(11, 12, 19, 24))
def test_g09_a_state_past_2_gib_steps_as_a_small_one(kit: Kit) -> None:
    """The same requests and steps in both: their rows are compared as far as the small one has them."""
    assert sizes(kit, "bytes of a state that steps")
    need(3 << 30, "a state")
    with another(kit) as one:  # work that it leaves delays no other test's
        try:
            step_past_2_gib(one)
        except TicketTimeout:  # rows of 269 MB are reset, behind which later calls wait for room
            pytest.skip("needs a device that resets 2.4 GB within its deadline")


def step_past_2_gib(kit: Kit) -> None:
    """Let requests enter both states, step, leave and follow, and compare after each step."""
    small, device, n = World(kit, replace(VAST, max_model_len=64)), kit.device, VAST.num_slots
    stream = small.stream
    try:
        state = kit.bound.state(VAST, name=small.name)
    except (OutOfMemory, MemoryError, TicketTimeout) as error:
        pytest.skip(f"needs a device that makes a state of 2.4 GB: {type(error).__name__}")
    assert state.layout.fields["token_ids"].stride * (n - 1) > GREAT, "the kit's own state is too small"
    admitted: dict[int, AdmittedRequest] = {}

    def insert(tasks: list[Task]) -> None:
        for task in tasks:
            if task.kind is TaskKind.PREFILL:
                admitted[task.request.admission_id] = state.admit(small.model.requests[task.request.admission_id])
        mine = [structs.replace(task, request=admitted[task.request.admission_id]) for task in tasks]
        arrive(kit.bound.insert_tasks(state=state, tasks=mine, stream=stream))
        small.enter(tasks)

    def advance(turn: int, *, speculative: bool) -> None:
        ids = np.arange(n * 3 * 2, dtype=np.int64).reshape(n, 3, 2) + 100 * turn
        small.sample(ids, [1 + slot % 3 for slot in range(n)], turn=turn)
        for name in SAMPLED:
            place = state.layout.fields[name].offset
            backdoor.put(device, state.memory, [(place, small.model.cells[name].tobytes())], stream)
        step = small.advance(np.random.default_rng(turn).permutation(n).tolist(), speculative=speculative, logprobs=1)
        arrive(kit.bound.update_inputs(state=state, step=step, stream=stream))
        ticket: Any = kit.bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream)
        should = small.output(step)
        assert_rows(ticket.record(PATIENCE), should)
        alike(f"step {turn}")

    def alike(after: str) -> None:
        for name, place in state.layout.fields.items():
            cells = small.model.cells[name]
            width = min(place.width, cells.shape[1])
            parts = [ByteRange(place.offset + at * place.stride, width * cells.itemsize) for at in range(n)]
            copied = device.copy_out(state.memory, parts, stream)
            arrive(copied)
            should = np.ascontiguousarray(cells[:, :width]).view(np.uint8)
            wrong = np.argwhere((np.array(copied.data) != should) & (should != backdoor.POISON)).tolist()
            assert not wrong or name == "request_serial", f"after {after}: {name} of slot {wrong[0][0]} is not as there"

    insert([small.entering(slot, [slot + 1, 2, 3], max_tokens=20, logprobs=1) for slot in range(n)])
    advance(0, speculative=False)
    new = [small.entering(slot, [7, slot], max_tokens=20) for slot in (n - 1, 1)]
    insert([*small.leaving([n - 1, 1]), *new])
    advance(1, speculative=True)
    advance(2, speculative=True)


THOUSANDS = StateConfig(
    2_100, 6, 4, max_logprobs=0, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1
)
"""More slots than two blocks of 1,024 threads."""


@guarantee(18, also=(19, 20))
@pytest.mark.parametrize(("count", "group"), [(1_100, FOLLOWER), (THOUSANDS.num_slots, ALONE)], ids=["1100", "2100"])
def test_g18_a_step_over_thousands_of_slots_cleans_each_of_them(kit: Kit, count: int, group: Group) -> None:
    """Every request has left; the last slots of the step and of the state are cleaned as the first ones are."""
    fixture, params = World(kit, THOUSANDS), SamplingParams(max_tokens=3)
    order = np.random.default_rng(count).permutation(THOUSANDS.num_slots)[:count].tolist()
    entering = [fixture.admit(Request(fixture.new_name(), [7], params)) for _ in order]
    fixture.enter([Task(TaskKind.PREFILL, *each, 0, 1, [0]) for each in zip(order, entering, strict=True)])
    gone = fixture.leaving(order[::2], TaskKind.PREEMPTED) + fixture.leaving(order[1::2], TaskKind.ABORTED)
    fixture.enter(gone)
    step = fixture.step(order, group=group)
    should, ticket = fixture.rows_of(step), fixture.save(step)
    assert_rows(fixture.take(ticket), should)
    arrive(ticket)
    fixture.check(f"save_output of a step over {count} slots")
    again = fixture.output(fixture.step(order))
    assert not again, f"the kit's own rows: {len(again)} requests are reported again"
