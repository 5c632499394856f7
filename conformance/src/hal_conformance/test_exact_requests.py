"""Requests and tokens bit for bit (G9, G13, G24): odd floats in parameters, in fields that must not change, in outputs
and in broadcasts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.output.sinks import MemorySink
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.bits import CLASSES, Array, classes
from .harness.guarantees import RANKS, guarantee
from .harness.reached import Reached
from .kit import Kit
from .ranks import work as rank_work
from .test_ranks import assert_agreed, assert_well

SMALL = StateConfig(num_slots=40, max_model_len=16, block_size=4, max_draft_tokens=1, max_logprobs=2, max_bad_words=3)
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
SIGNED = (
    0.0,
    -0.0,
    2.0**-149,
    -(2.0**-149),
    2.0**-150,
    1e-40,
    -1e-42,
    2.0**-126,
    -(2.0**-127),
    0.1,
    -1 / 3,
    1e6,
    2.0**-25 + 1,
)
SHARES = (1.0, 1 - 2.0**-25, 1 - 2.0**-24, 2.0**-149, 1e-40, 2.0**-126, 0.1, 0.99999997, 2.0**-150 * 1.5)
"""Parameters at the ends of float32: zeros of both signs, denormals, ties; rounding or flushing by a device is
noticed."""


def sampling(turn: int) -> SamplingParams:
    """Return parameters with another edge value in each field."""
    size = len(SIGNED)
    return SamplingParams(
        temperature=abs(SIGNED[turn % size]) if turn % 5 else -0.0,
        top_k=(2**31 - 1, 0, 1, 2**24 + 1, 2**16)[turn % 5],
        top_p=SHARES[turn % len(SHARES)],
        min_p=SHARES[(turn + 4) % len(SHARES)] if turn % 4 else -0.0,
        seed=(0, 2**63 - 1, 2**53 + 1, 2**31, 2**32 - 1, 0x7FF0000000000001)[turn % 6],
        repetition_penalty=(1.0, 1e-6, 1e6, 1 + 2.0**-24, 0.1)[turn % 5],
        frequency_penalty=SIGNED[(turn + 1) % size] if turn % 2 else -SIGNED[(turn + 1) % size],
        presence_penalty=SIGNED[(turn + 3) % size] if turn % 2 else -SIGNED[(turn + 3) % size],
        max_tokens=(2**31 - 1, 2**24 + 1, 9)[turn % 3],
        bad_words=(2**31 - 1, 0, 2**24 + 1)[: turn % 4],
        eos_token_ids=(2**31 - 1, 2**16)[: turn % 3],
    )


@guarantee(9)
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("kind", [TaskKind.PREFILL, TaskKind.REMOTE_PREFILL], ids=lambda kind: kind.name.lower())
def test_g09_parameters_and_rows_arrive_bit_for_bit(kit: Kit, kind: TaskKind, count: int) -> None:
    fixture, turns = World(kit, SMALL), 2 * len(SIGNED) * len(SHARES) // 3
    reached, seen = Reached(("zero", "denormal", "finite")), {name: set[int]() for name in REAL}
    for first in range(0, turns, count) if count > 3 else range(0, 60, count):
        tasks = []
        for slot in range(count):
            params = sampling(first + slot)
            tokens = [2**31 - 1, 0, 2**24 + 1, 2**16, first + slot][: 1 + (first + slot) % 5]
            request = fixture.admit(Request(fixture.new_name(), tokens, params))
            ids = [2**31 - 1, 2**24 + 1, 0][:2]
            if kind is TaskKind.REMOTE_PREFILL:
                drafts = [2**31 - 1] * (slot % 2)
                first_token = 2**31 - 1 - slot
                tasks.append(Task(kind, slot, request, request.total, 0, ids, first_token=first_token, drafts=drafts))
            else:
                tasks.append(Task(kind, slot, request, 0, request.total, ids))
        fixture.enter(tasks)
        fixture.check(f"{count} requests with parameters at the ends of their types")
        for name in REAL:
            found = fixture.model.cells[name][:count].view(np.uint32).reshape(-1)
            seen[name] |= set(found.tolist())
            for what, number in classes(found, dtype_of("float32")).items():
                if number:
                    reached.note(what)
        fixture.enter([Task(TaskKind.ABORTED, task.slot, task.request) for task in tasks])
        fixture.output(fixture.step(range(count)))
    reached.check()
    if count > 3:
        assert {0, 1 << 31, 1} <= seen["frequency_penalty"], f"too few values were inserted: {seen}"


ODD_SINGLES = (0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFA00000, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0x80000000, 0,
               0xBF800001)  # fmt: skip


def odd_words(count: int, start: int = 0) -> Array:
    """Return float32 words: NaNs with payloads of both signs, infinities, denormals, zeros, in turn."""
    return np.resize(np.roll(np.array(ODD_SINGLES, np.uint32), start), count)


@guarantee(9)
def test_g09_other_slots_keep_the_bits_of_whatever_they_hold(kit: Kit) -> None:
    fixture = World(kit, SMALL)
    names = [name for name, place in fixture.state.layout.fields.items() if place.field.dtype.name == "float32"]
    wide = {name: fixture.model.cells[name].size for name in names}
    fixture.put({name: odd_words(size, at).view(np.float32) for at, (name, size) in enumerate(wide.items())})
    fixture.check("fields were set to NaNs, infinities, denormals and zeros")
    for slots in ([7], [*range(8, 20)]):
        tasks = []
        for slot in slots:
            request = fixture.admit(Request(fixture.new_name(), [slot], sampling(slot)))
            tasks.append(Task(TaskKind.PREFILL, slot, request, 0, 1, [slot]))
        fixture.enter(tasks)
        fixture.check(f"requests entered slots {slots}, beside fields of odd bits")
    step = fixture.advance([7, *range(8, 20)])
    fixture.check("a step beside fields of odd bits")
    fixture.output(step)
    fixture.check("the output of a step beside fields of odd bits")
    view = fixture.state.view("topk_logprobs")
    odd = odd_words(view.size, 5).reshape(view.shape)
    arrive(fixture.bound.async_set_value(target=view, value=odd.view(np.float32), stream=fixture.stream))
    fixture.model.cells["topk_logprobs"].view(np.uint32)[...] = odd
    fixture.check("async_set_value of odd bits into a field of the state")


@guarantee(24)
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_g24_log_probabilities_leave_bit_for_bit(kit: Kit, speculative: bool) -> None:
    fixture, reached = World(kit, SMALL), Reached(CLASSES)
    slots, accept, columns = SMALL.num_slots, SMALL.max_accept, SMALL.max_logprobs + 1
    fixture.enter(fixture.entering(slot, name=f"r{slot}", logprobs=2) for slot in range(slots))
    ids = (np.arange(slots * accept * columns, dtype=np.int64) * 7 + 2**32).reshape(slots, accept, columns)
    counts = np.full(slots, accept if speculative else 1, np.int32)
    for turn in range(3):
        odd = odd_words(slots * accept * columns, turn).reshape(slots, accept, columns)
        fixture.put({"topk_token_ids": ids, "topk_logprobs": odd.view(np.float32), "sampled_token_ids": ids[:, 0, 0],
                  "accept_tokens": ids[:, :, 0], "accept_num": counts})  # fmt: skip
        order = np.random.default_rng(turn).permutation(slots)
        step = fixture.advance(order.tolist(), speculative=speculative, logprobs=turn % columns)
        sink = MemorySink()
        arrive(fixture.save(step, sink))
        got = sink.records[0].logprobs
        should = odd[order, : counts[0], : turn % columns + 1].reshape(-1, turn % columns + 1)
        assert got is not None, "the record has no log-probabilities"
        assert got.dtype == np.float32, f"log-probabilities are {got.dtype}"
        assert got.shape == should.shape, f"log-probabilities have shape {got.shape}, but should have {should.shape}"
        wrong = np.argwhere(np.ascontiguousarray(got).view(np.uint32) != should)
        assert not len(wrong), (
            f"log-probability {wrong[0].tolist()} is {got.view(np.uint32)[tuple(wrong[0])]:#010x}, but should be"
            f" {should[tuple(wrong[0])]:#010x}"
        )
        fixture.check("save_output of log-probabilities of odd bits")
        for what, number in classes(should.reshape(-1), dtype_of("float32")).items():
            if number:
                reached.note(what)
    reached.check()


@guarantee(13, requires=RANKS)
@pytest.mark.parametrize("max_draft_tokens", [0, 2], ids=["plain", "speculative"])
def test_g13_tokens_whose_bits_are_odd_as_floats_are_broadcast_as_they_are(kit: Kit, max_draft_tokens: int) -> None:
    size = replace(SMALL, num_slots=33, max_draft_tokens=max_draft_tokens)
    seen = kit.ranks.run(kit.recipe, rank_work.agree, [(0, 1)], (), size, rank_work.ODD, 2, ranks=[0, 1])
    for rank in (0, 1):
        assert_well(rank, seen[rank].error, "broadcast_tokens")
        assert_agreed(rank, seen[rank], seen[0], size)
