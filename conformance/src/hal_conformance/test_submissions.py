"""Submissions do not grow with requests or fields (G10), nor with the memories of a write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hal_core.contract.counters import Counters
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ALL, draw_batch
from .fixtures.hook_cases import RICH
from .fixtures.many import MANY, blocks, handoff, prefill, prompt, request
from .fixtures.sizes import sizes as sizes_of
from .fixtures.stepping import run_step
from .fixtures.world import World
from .harness import backdoor
from .harness.backdoor import arrive, poisoned
from .harness.guarantees import guarantee
from .harness.natives import looking_below, reaching
from .harness.reached import Reached
from .kit import Draw, Kit, examples

A_CALL = 2
"""Submissions (copies plus launches) that one call may make for each staging block that it fills."""


def entering(fixture: World, slots: range, *, rich: bool) -> list[Task]:
    """Return a task with a request for each slot; rich ones use every field."""
    params = RICH if rich else SamplingParams(max_tokens=9)
    requests = [fixture.admit(Request(fixture.new_name(), [1, 2, 3], params, [4] if rich else [])) for _ in slots]
    return [Task(TaskKind.PREFILL, slot, request, 0, 3, [0, 1]) for slot, request in zip(slots, requests, strict=True)]


def spent(fixture: World, tasks: list[Task]) -> Counters:
    """Return the cost of one insertion, by the device's own counters."""
    before = fixture.bound.counters()
    ticket = fixture.insert(tasks)
    counted = fixture.bound.counters() - before
    arrive(ticket)
    return counted


@guarantee(10, requires="fused_scatter")
def test_g10_submissions_grow_with_neither_requests_nor_fields(kit: Kit) -> None:
    fixture = World(kit, StateConfig(num_slots=64, max_model_len=32, block_size=2))
    costs = {
        "one plain request": spent(fixture, entering(fixture, range(1), rich=False)),
        "one request that uses every field": spent(fixture, entering(fixture, range(1, 2), rich=True)),
        "60 plain requests": spent(fixture, entering(fixture, range(2, 62), rich=False)),
    }
    found = {what: cost.submissions for what, cost in costs.items()}
    assert max(found.values()) <= A_CALL, f"submissions a call: {found}, but each should be at most {A_CALL}"
    waits = {what: cost.host_waits for what, cost in costs.items()}
    assert not any(waits.values()), f"host waits a call: {waits}, but each should be 0"
    fixture.check("insertions of one and of many requests")


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_any_batch_is_at_most_two_submissions(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    for _ in range(2):
        cost = spent(fixture, draw_batch(draw, fixture, ALL))
        assert cost.submissions <= A_CALL, f"{cost.submissions} submissions for one batch, but at most {A_CALL} are due"
        assert cost.host_waits == 0, f"the host waited {cost.host_waits} times for the device during one insertion"
        fixture.output(run_step(draw, fixture))


@guarantee(10)
@examples(0.5)
def test_g10_the_devices_own_counters_agree_with_a_count_below_it(kit: Kit, draw: Draw) -> None:
    probe, fixture = kit.driver_counts(), World(kit, draw(sizes(), "sizes"))
    below, own = probe(), kit.bound.counters()
    fixture.enter(draw_batch(draw, fixture, least=1))
    arrive(fixture.save(run_step(draw, fixture)))
    seen = probe() - below
    counted = kit.bound.counters() - own
    for name in ("submissions", "uploads", "launches", "copies_out"):
        got, should = getattr(counted, name), getattr(seen, name)
        assert got == should, f"counters() says {got} {name}, but {should} reached the driver"


@guarantee(10, requires=("fused_scatter", "async_h2d", "can_hold_stream"))
@examples(0.5)
def test_g10_an_insertion_does_not_wait_for_the_device(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    size = draw(st.integers(1, 3), "batches")
    tickets = []
    with kit.held(fixture.stream):
        for _ in range(size):
            tickets.append(fixture.insert(draw_batch(draw, fixture, (TaskKind.PREFILL, TaskKind.MORE_BLOCKS))))
    for ticket in tickets:
        arrive(ticket)
    fixture.check("insertions into a held stream")


# -- at the sizes of production ----------------------------------------------------------------------------------------


A_REQUEST = 4
"""Of so many more requests, a primitive may run one line of Python more: a call of the driver for each is a loop."""


def cost(
    fixture: World, tasks: Sequence[Task], what: str, seen_lines: dict[str, tuple[int, int]] | None = None
) -> Counters:
    """Return the cost of an insertion by the device's own counters, which must have counted it as the driver has.

    ``seen_lines``: by submissions and kind of batch, the fewest requests, and the lines that the primitives ran then.
    """
    __tracebackhide__ = True
    probe = reaching(fixture.device)
    before, below = fixture.bound.counters(), probe() if probe else Counters()
    with looking_below(fixture.device, at_all=seen_lines is not None) as ran:
        ticket = fixture.insert(tasks)
    spent = fixture.bound.counters() - before
    arrive(ticket)
    kinds = f"{spent.submissions} submissions of " + " and ".join(sorted({task.kind.name for task in tasks}))
    count, lines = ({} if seen_lines is None else seen_lines).setdefault(kinds, (len(tasks), ran.lines))
    assert ran.lines - lines <= max(0, len(tasks) - count) / A_REQUEST + A_REQUEST, (
        f"{what}: the primitives ran {ran.lines} lines, but {lines} for {count} requests: what they do grows with them"
    )
    waits = ran.waits if fixture.bound.capabilities.async_h2d else 0
    assert not waits, f"{what}: the host waited {waits} times for an event, and counted {spent.host_waits}"
    if probe:
        seen = (probe() - below).submissions
        assert seen == spent.submissions, (
            f"{what}: counters() says {spent.submissions} submissions, the driver had {seen}"
        )
    later = fixture.bound.counters() - before
    assert spent.submissions >= 1, f"{what} wrote to the device, but counters() has {spent.submissions} submissions"
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
def test_g10_every_kind_of_batch_is_counted_and_large_ones_cost_the_same(kit: Kit) -> None:
    counts = sizes_of(kit, "requests of a batch that is counted")
    fixture = World(kit, replace(MANY, num_slots=max(counts) + 3))
    n, reached = fixture.sizes.num_slots, Reached(kind.name for kind in TaskKind)
    lines: dict[str, tuple[int, int]] = {}
    for turn, count in enumerate(counts):
        looked = count in (counts[0], counts[len(counts) // 2])  # the more requests, the longer it takes
        spend = partial(cost, fixture, seen_lines=lines if looked else None)
        slots = np.random.default_rng(turn).permutation(n)[:count].tolist()
        entering = [request(fixture, slot) for slot in slots]
        halves = [
            prefill(fixture, slot, one, max(1, one.total // 2)) for slot, one in zip(slots, entering, strict=True)
        ]
        spend(halves, f"{count} requests entering")
        chunks = [
            Task(TaskKind.PREFILL_CHUNK, slot, one, half.num_scheduled_tokens, one.total - half.num_scheduled_tokens,
                 blocks(MANY, 4 * (-(-one.total // 4) - len(half.blocks)), slot), len(half.blocks))
            for slot, one, half in zip(slots, entering, halves, strict=True) if one.total > half.num_scheduled_tokens
        ]  # fmt: skip
        fixture.put({"seq_lens_this_time": np.zeros(n), "seq_lens_encoder": np.zeros(n)})
        if chunks:
            spend(chunks, f"{len(chunks)} chunks")
        going = [Task(TaskKind.MORE_BLOCKS, slot, fixture.model.residents[slot].admitted, blocks=[1, 2],
                      first_block=fixture.model.residents[slot].blocks) for slot in slots]  # fmt: skip
        spend(going, f"{count} requests with more blocks")
        kind = TaskKind.PREEMPTED if turn % 2 else TaskKind.ABORTED
        spend(fixture.leaving(slots, kind), f"{count} requests leaving")
        fixture.output(fixture.step(slots))
        spend([handoff(fixture, slot, request(fixture, slot)) for slot in slots], f"{count} handoffs")
        kind = TaskKind.ABORTED if turn % 2 else TaskKind.PREEMPTED
        mixed = [
            *fixture.leaving(slots, kind),
            *(prefill(fixture, slot, request(fixture, slot + 1)) for slot in slots),
        ]
        spend(mixed, f"{count} requests leaving and as many entering")
        spend(
            fixture.leaving(slots, TaskKind.ABORTED if kind is TaskKind.PREEMPTED else TaskKind.PREEMPTED),
            "all leave",
        )
        fixture.output(fixture.step(slots))
        for task in (*halves, *chunks, *going, *mixed):
            reached.note(task.kind.name)
        reached.note("REMOTE_PREFILL")
        fixture.check(f"batches of {count}")
    reached.check()


LONG = 4000
"""Tokens of each prompt of a batch of megabytes."""


@guarantee(10, requires="fused_scatter")
def test_g10_a_batch_of_megabytes_costs_the_same(kit: Kit) -> None:
    for nbytes in sizes_of(kit, "bytes of a batch that is counted"):
        count = -(-nbytes // (8 * LONG))
        size = StateConfig(count, LONG + 8, 64, max_draft_tokens=0, max_logprobs=0, max_stop_sequences=1)
        fixture = World(kit, size)
        tasks = [fixture.entering(slot, prompt(slot, LONG), blocks=range(-(-LONG // 64))) for slot in range(count)]
        cost(fixture, tasks, f"{count} requests of {LONG} tokens")
        fixture.check(f"{count} requests of {LONG} tokens entered")


@guarantee(10, requires=("fused_scatter", "async_h2d", "can_hold_stream"))
def test_g10_a_large_insertion_does_not_wait_for_the_device(kit: Kit) -> None:
    """While nothing else of the device runs either, as of an engine on which the host may wait behind others' work."""
    fixture, own = World(kit, MANY), kit.device
    tasks = [prefill(fixture, slot, request(fixture, slot)) for slot in range(512)]
    inner = (getattr(fixture.stream, "copy_stream", None), getattr(own, "upload_stream", None))
    with ExitStack() as held:
        for stream in (fixture.stream, *filter(None, inner)):
            held.enter_context(kit.held(stream, "a large insertion"))
        before = fixture.bound.counters()
        tickets = [fixture.insert(tasks[low:high]) for low, high in ((0, 1), (1, 66), (66, 512))]
        waited = (fixture.bound.counters() - before).host_waits
        done = [ticket.done() for ticket in tickets]
    assert not waited, f"the host waited {waited} times for the device"
    assert not any(done), f"tickets answer done={done} while their stream is held"
    for ticket in tickets:
        arrive(ticket)
    fixture.check("512 requests entered on a held stream")


TYPES = ("bool", "uint8", "int16", "int32", "int64", "float32")
MOST = 40
"""Bytes of each memory: 8 rows of at most 5."""


class Blocks:
    """Memories of their own, each with the bytes that it must have."""

    def __init__(self, kit: Kit, count: int) -> None:
        self.kit, self.stream = kit, kit.device.default_stream  # prepared on it, and read on the one that is used
        self.memories = [kit.device.allocate(8 * MOST) for _ in range(count)]
        self.should = [poisoned(8 * MOST) for _ in self.memories]
        for memory, block in zip(self.memories, self.should, strict=True):
            backdoor.write(kit.device, memory, 0, block, self.stream)

    def view(self, number: int, slots: int, width: int, dtype: str) -> tuple[View, np.ndarray]:
        """A view ``[slots, width]`` of a memory, and the array that it must equal."""
        kind = dtype_of(dtype)
        view = View.contiguous(self.memories[number], 8, (slots, width), kind)
        part = self.should[number][8 : 8 + slots * width * kind.itemsize]
        return view, part.view(kind.storage).reshape(slots, width)

    def check(self) -> None:
        """Compare every byte of every memory."""
        __tracebackhide__ = True
        for number, (memory, block) in enumerate(zip(self.memories, self.should, strict=True)):
            got = backdoor.read(self.kit.device, memory, self.stream)
            wrong = np.flatnonzero(got[: len(block)] != block)
            assert not len(wrong), (
                f"byte {wrong[0]} of memory {number} is {got[wrong[0]]}, but should be {block[wrong[0]]}"
            )


def draw_writes(draw: Draw, blocks: Blocks) -> Writes:
    """Writes of each kind to each memory, some of them over others, made in the expected arrays as well."""
    writes, views, every = Writes(), [], range(len(blocks.memories))
    for number in every:
        dtype = draw(st.sampled_from(TYPES), f"type of memory {number}")
        slots, width = draw(st.integers(1, 5), "slots"), draw(st.integers(1, 5), "width")
        views.append(blocks.view(number, slots, width, dtype))
    again = draw(st.lists(st.sampled_from(every), max_size=4), "memories written again")
    for turn, number in enumerate([*every, *again]):
        view, cells = views[number]
        (slots, width), one = view.shape, turn % 2
        some = draw(st.lists(st.integers(0, slots - 1), unique=True, min_size=1), "slots written")
        kind = draw(st.sampled_from(["set", "fill", "rows", "ragged"]), f"write to memory {number}")
        if kind == "set":
            writes.set(view[some[0]], cells.dtype.type(one).item())
            cells[some[0]] = one
        elif kind == "fill":
            begins = [draw(st.integers(0, width), "first element") for _ in some]
            if draw(st.booleans(), "one first element for all"):
                begins = begins[:1] * len(some)
            same = begins[0] if len({*begins}) == 1 else np.array(begins)
            writes.fill(view, some, cells.dtype.type(one).item(), same)
            for slot, begin in zip(some, begins, strict=True):
                cells[slot, begin:] = one
        elif kind == "rows":
            values = (np.arange(turn, turn + len(some) * width) % 2).astype(cells.dtype).reshape(len(some), width)
            writes.rows(view, some, values)
            cells[some] = values
        else:
            rows = [np.full(draw(st.integers(0, width), "length"), one, cells.dtype) for _ in some]
            writes.ragged(view, some, np.concatenate(rows), [*map(len, rows)])
            for slot, row in zip(some, rows, strict=True):
                cells[slot, : len(row)] = row
    return writes


@guarantee(5, also=(4,))
@examples()
def test_g05_writes_to_several_memories_change_nothing_else(kit: Kit, draw: Draw) -> None:
    """Two calls, of writes that may overlap, on a held stream."""
    blocks = Blocks(kit, draw(st.integers(1, 5), "memories"))
    if draw(st.booleans(), "on a stream of its own"):
        blocks.stream = kit.device.stream()
    with kit.held(blocks.stream, "a write to several memories"):
        tickets = [kit.bound.write(writes=draw_writes(draw, blocks), stream=blocks.stream) for _ in range(2)]
    for ticket in tickets:
        arrive(ticket)
    blocks.check()


@guarantee(5, also=(1, 4, 9))
def test_g05_a_write_reaches_each_of_many_memories(kit: Kit) -> None:
    stream = kit.device.default_stream
    for many in sizes_of(kit, "memories of a write"):
        memories, writes = [kit.device.allocate(64) for _ in range(many)], Writes()
        for at, memory in enumerate(memories):
            writes.set(View.contiguous(memory, 0, (8,), dtype_of("int64")), at + 1)
        arrive(kit.bound.write(writes=writes, stream=stream))
        for at, memory in enumerate(memories):
            got = backdoor.read(kit.device, memory, stream)[:64].view(np.int64)
            assert (got == at + 1).all(), f"memory {at + 1} of {many} that one write has holds {got.tolist()}"


ROWS = np.arange(40, dtype=np.int64).reshape(5, 8)
CHANGED: dict[str, Callable[[Writes, View, list[Any]], None]] = {
    "rows": lambda writes, view, given: writes.rows(view, given[0], given[1]),
    "ragged rows": lambda writes, view, given: writes.ragged(view, given[0], given[1].reshape(-1), [8] * 5),
    "a fill of rows": lambda writes, view, given: writes.fill(view, given[0], 7, given[2]),
    "an array": lambda writes, view, given: writes.set(view[:5], given[1]),
    "a strided array": lambda writes, view, given: writes.set(view[::2, ::2][:3], given[1][:3, :4]),
    "a list": lambda writes, view, given: writes.set(view[:5], given[3]),
}
"""Ways to write to several memories: slots, rows, first elements and a list, which the caller then changes."""


@guarantee(2)
@pytest.mark.parametrize("count", [1, 3])
def test_g02_what_a_write_was_made_of_may_be_changed_after_it(kit: Kit, count: int) -> None:
    stream, device = kit.device.stream(), kit.device
    for what, add in CHANGED.items():
        memories, should = [device.allocate(448) for _ in range(count)], np.zeros((7, 8), np.int64)
        for memory in memories:
            backdoor.write(device, memory, 0, should.view(np.uint8).reshape(-1), stream)
        given: list[Any] = [np.array([4, 0, 2, 1, 6]), ROWS.copy(), np.array([3, 0, 8, 7, 1]), ROWS.tolist()]
        with kit.held(stream, f"{what} for {count} memories"):
            writes = Writes()
            for memory in memories:
                add(writes, View.contiguous(memory, 0, (7, 8), dtype_of("int64")), given)
            ticket = kit.bound.write(writes=writes, stream=stream)
            for one in given:
                one[:] = [[9] * 8] * 5 if one is given[3] else 5
            del writes
        arrive(ticket, what)
        if what in ("rows", "ragged rows"):
            should[[4, 0, 2, 1, 6]] = ROWS
        elif what == "a fill of rows":
            for slot, begin in zip((4, 0, 2, 1, 6), (3, 0, 8, 7, 1), strict=True):
                should[slot, begin:] = 7
        elif what == "a strided array":
            should[:6:2, ::2] = ROWS[:3, :4]
        else:
            should[:5] = ROWS
        for number, memory in enumerate(memories):
            got = backdoor.read(device, memory, stream)[:448].view(np.int64).reshape(7, 8)
            assert (got == should).all(), (
                f"{what} for {count} memories, changed after the call: {got.tolist()} in memory {number}"
            )


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_several_memories_are_one_submission(kit: Kit, draw: Draw) -> None:
    """Or one for each memory, if the device's kernels take no addresses."""
    blocks = Blocks(kit, 5)
    writes = draw_writes(draw, blocks)
    before = kit.bound.counters()
    ticket = kit.bound.write(writes=writes, stream=blocks.stream)
    cost = kit.bound.counters() - before
    arrive(ticket)
    due = A_CALL if kit.bound.capabilities.several_memories else A_CALL * 5
    assert cost.submissions <= due, f"{cost.submissions} submissions for five memories, but at most {due} are due"
    blocks.check()


@guarantee(26)
def test_g26_memories_that_overlap_are_refused_and_nothing_changes(kit: Kit) -> None:
    blocks, writes = Blocks(kit, 1), Writes()
    view, _ = blocks.view(0, 4, 2, "int32")
    memory = view.memory

    class Twin:
        device, address, nbytes = memory.device, memory.address, memory.nbytes

    writes.set(view, 1)
    writes.set(View.contiguous(Twin(), 0, (2,), view.dtype), 2)
    with pytest.raises(InvalidValue, match="two targets share memory"):
        kit.bound.write(writes=writes, stream=blocks.stream)
    blocks.check()
