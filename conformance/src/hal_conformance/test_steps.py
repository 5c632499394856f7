"""Steps (G9): what ends a request, at and beside each limit, and the sizes of production."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason, SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.sizes import sizes as sizes_of
from .fixtures.world import World
from .harness.guarantees import guarantee
from .kit import Kit

LENGTH, STOP, NONE = FinishReason.LENGTH, FinishReason.STOP, FinishReason.NONE
TOKENS = (11, 12, 13, 14, 15, 16)
"""The tokens of every request, in this order, whatever the step."""
EOS = {"eos_token_ids": (14,)}
PAIR = {"stop_sequences": ((13, 14),)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], FinishReason, int]] = {
    "nothing": ({}, {}, NONE, 6),
    "an end token": ({}, EOS, STOP, 4),
    "an end token, the last of two": ({}, {"eos_token_ids": (99, 14)}, STOP, 4),
    "an end token before the least tokens": ({}, EOS | {"min_tokens": 5}, NONE, 6),
    "an end token as the last of the least": ({}, EOS | {"min_tokens": 4}, STOP, 4),
    "an end token as the last of the most": ({}, EOS | {"max_tokens": 4}, STOP, 4),
    "an end token after the most": ({}, EOS | {"max_tokens": 3}, LENGTH, 3),
    "an end token in the prompt": ({"prompt": [14, 14]}, {"eos_token_ids": (14,), "max_tokens": 3}, LENGTH, 3),
    "the most tokens": ({}, {"max_tokens": 5}, LENGTH, 5),
    "the first token": ({}, {"max_tokens": 1}, LENGTH, 1),
    "the first token as an end": ({}, {"eos_token_ids": (11,)}, STOP, 1),
    "a stop sequence": ({}, PAIR, STOP, 4),
    "a stop sequence of one": ({}, {"stop_sequences": ((12,),)}, STOP, 2),
    "the second of two": ({}, {"stop_sequences": ((1, 2, 3), (14, 15))}, STOP, 5),
    "two at once": ({}, {"stop_sequences": ((14,), (13, 14))}, STOP, 4),
    "a sequence that is not met in full": ({}, {"stop_sequences": ((12, 14), (16, 15))}, NONE, 6),
    "a sequence that the prompt begins": ({"prompt": [5, 10]}, {"stop_sequences": ((10, 11), (15, 16))}, STOP, 6),
    "a sequence that earlier output begins": ({"output": [9, 10]}, {"stop_sequences": ((9, 10, 11),)}, STOP, 1),
    "a sequence before the least tokens": ({}, PAIR | {"min_tokens": 6}, NONE, 6),
    "a sequence as the last of the least": ({}, PAIR | {"min_tokens": 4}, STOP, 4),
    "a sequence as the last of the most": ({}, PAIR | {"max_tokens": 4}, STOP, 4),
    "the most tokens, some of them earlier": ({"output": [9, 9]}, {"max_tokens": 5}, LENGTH, 3),
    "the least tokens, some of them earlier": ({"output": [9, 9]}, EOS | {"min_tokens": 6}, STOP, 4),
    "a full row": ({"prompt": [7] * 20}, {}, LENGTH, 4),
    "a full row and an end token": ({"prompt": [7] * 20}, EOS, STOP, 4),
    "a first token from elsewhere": ({"role": SplitRole.DECODE}, {"max_tokens": 3}, LENGTH, 2),
    "a first token from elsewhere, and a sequence with it": (
        {"role": SplitRole.DECODE}, {"stop_sequences": ((10, 11, 12),)}, STOP, 2
    ),
}  # fmt: skip
"""Of each request what differs, its parameters, why it ends, and after how many tokens."""
SIZES = StateConfig(
    num_slots=len(CASES), max_model_len=24, block_size=8, max_draft_tokens=5, max_logprobs=0, max_stop_length=3
)
WAYS: dict[str, Sequence[int]] = {
    "plain steps": (1,) * 6,
    "one by one": (1,) * 6,
    "all at once": (6,),
    "two a step": (2, 2, 2),
    "some, none, the rest": (3, 0, 1, 2),
}


@guarantee(9, also=(12, 19, 24, 25))
@pytest.mark.parametrize("way", WAYS)
def test_g09_each_end_of_a_request_comes_at_its_token(kit: Kit, way: str) -> None:
    speculative = way != "plain steps"
    fixture = World(kit, SIZES if speculative else replace(SIZES, max_draft_tokens=0))
    fixture.enter(entering(fixture, slot, case) for slot, case in enumerate(CASES))
    fixture.check("requests of every end")
    given: dict[str, tuple[FinishReason, int]] = dict.fromkeys(CASES, (NONE, 0))
    at = 0
    for count in WAYS[way]:
        offer(fixture, at, count)
        at += count
        order = np.random.default_rng(at).permutation(len(CASES)).tolist()
        step = fixture.advance(order, speculative=speculative)
        fixture.check(f"a step that gives {count} tokens, {at} in all")
        for row in fixture.output(step):
            reason, tokens = given[row.request_id]
            given[row.request_id] = FinishReason(reason or row.finish), tokens + len(row.tokens)
    should = {name: (reason, tokens) for name, (_, _, reason, tokens) in CASES.items()}
    wrong = {name: (given[name], should[name]) for name in CASES if given[name] != should[name]}
    assert not wrong, f"the kit's own rows, and what they should be: {wrong}"


def entering(fixture: World, slot: int, case: str) -> Task:
    """Return a task that lets the request of a case enter a slot; a first token from elsewhere is 10."""
    changes, params, *_ = CASES[case]
    given: dict[str, Any] = {"prompt": [1, 2], **changes}
    one = fixture.admit(Request(case, params=SamplingParams(**{"max_tokens": 20, **params}), **given))
    if one.role is SplitRole.DECODE:
        return Task(TaskKind.REMOTE_PREFILL, slot, one, one.total, 0, [slot], first_token=10)
    blocks = [*range(-(-one.total // SIZES.block_size))]
    return Task(TaskKind.PREFILL, slot, one, 0, one.total, blocks)


def offer(fixture: World, at: int, count: int) -> None:
    """Write the next tokens of every request, and how many of them are accepted."""
    n, most = fixture.sizes.num_slots, fixture.sizes.max_accept
    rows = np.array([*TOKENS[at:], *[77] * most])[:most]
    fields: dict[str, Any] = {"sampled_token_ids": np.full(n, rows[0])}
    if most > 1:
        fields |= {"accept_tokens": np.tile(rows, (n, 1)), "accept_num": np.full(n, count)}
    fixture.put(fields)


LONG = StateConfig(
    num_slots=6,
    max_model_len=512,
    block_size=16,
    max_draft_tokens=36,
    max_logprobs=12,
    max_eos=70,
    max_stop_sequences=70,
    max_stop_length=40,
)
"""More end tokens, stop sequences and tokens than a warp or a wavefront has lanes."""
LONGEST = tuple(range(1000, 1000 + LONG.max_stop_length))
"""A stop sequence of the greatest length."""
OTHERS = tuple((2000 + at,) * (at % LONG.max_stop_length + 1) for at in range(LONG.max_stop_sequences - 1))
"""Stop sequences before it, of other lengths, so that it is the last that fits."""
PROMPT = 300
"""Tokens of each prompt: positions past 256."""


def entered(kit: Kit, sizes: StateConfig, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> World:
    """A state in whose slots these prompts were prefilled whole."""
    fixture = World(kit, sizes)
    tasks = []
    for slot, (prompt, params) in enumerate(requests):
        request = fixture.admit(Request(f"r{slot}", list(prompt), params))
        blocks = [*range(-(-len(prompt) // sizes.block_size))]
        tasks.append(Task(TaskKind.PREFILL, slot, request, 0, len(prompt), blocks))
    fixture.enter(tasks)
    fixture.check(f"an insertion of {len(tasks)} requests")
    return fixture


def accept(fixture: World, given: Sequence[Sequence[int]], what: str) -> list[Any]:
    """A speculative step that gives each slot these tokens; compare every byte, and return the model's rows."""
    __tracebackhide__ = True
    sizes = fixture.sizes
    tokens = np.full((sizes.num_slots, sizes.max_accept), 5, np.int64)
    for slot, row in enumerate(given):
        tokens[slot, : len(row)] = row
    counts = np.array([len(row) for row in given], np.int32)
    shape = (sizes.num_slots, sizes.max_accept, sizes.max_logprobs + 1)
    alternatives = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    logprobs = -alternatives.astype(np.float32) / 8
    alternatives[:, :, 0] = tokens
    fixture.put(
        {
            "accept_tokens": tokens,
            "accept_num": counts,
            "topk_token_ids": alternatives,
            "topk_logprobs": logprobs,
            "topk_ranks": np.arange(sizes.num_slots * sizes.max_accept, dtype=np.int32),
        }
    )
    step = fixture.advance(range(len(given)), speculative=True, logprobs=sizes.max_logprobs)
    fixture.check(what)
    return fixture.output(step)


@guarantee(9, also=(12, 24, 25))
def test_g09_many_accepted_tokens_end_where_the_first_stop_ends(kit: Kit) -> None:
    prompt, most = list(range(3, PROMPT + 3)), LONG.max_accept
    stops = SamplingParams(max_tokens=60, stop_sequences=(*OTHERS, LONGEST), logprobs=12)
    ends = SamplingParams(max_tokens=60, eos_token_ids=(*range(100, 99 + LONG.max_eos), 4), logprobs=12)
    fixture = entered(kit, LONG, [
        (prompt, stops), ([*prompt, *LONGEST[:4]], stops), (prompt, SamplingParams(max_tokens=most - 1)),
        (prompt, SamplingParams(max_tokens=60)), (prompt, ends), ([7] * (LONG.max_model_len - 6), stops),
    ])  # fmt: skip
    accept(fixture, [[8], [LONGEST[4]], [8], [8], [8], [8]], "a step that ends the prefill of long prompts")
    first = accept(
        fixture,
        [LONGEST[:most], LONGEST[5:], [9] * most, [9] * most, [9] * (most - 2) + [4, 9], [9] * most],
        f"a step of up to {most} accepted tokens",
    )
    lengths = [len(row.tokens) for row in first]
    assert lengths == [most, len(LONGEST) - 5, most - 2, most, most - 1, 5], f"the kit's own rows: {lengths}"
    assert first[1].finish is FinishReason.NONE, "the kit's own row ends with a sequence that begins in the prompt"
    second = accept(
        fixture,
        [[*LONGEST[most:], 9, 9], [9], [], [9] * most, [], []],
        "a step that ends a stop sequence of the greatest length",
    )
    found = [(len(row.tokens), row.finish.name) for row in second[:1]]
    assert found == [(len(LONGEST) - most, "STOP")], f"the kit's own rows: {found}"


@guarantee(9, also=(12, 24))
def test_g09_of_many_accepted_tokens_stops_and_ends_the_last_is_looked_at(kit: Kit) -> None:
    for n in sizes_of(kit, "tokens, stops and ends of a step"):
        wide = StateConfig(4, 2 * n + 64, 16, max_draft_tokens=n - 1, max_logprobs=0, max_eos=n, max_stop_sequences=n,
                           max_stop_length=2)  # fmt: skip
        stops = tuple((1000 + at, 5000 + at) for at in range(n))
        params: list[dict[str, Any]] = [{}, {"stop_sequences": stops}, {"eos_token_ids": (*range(9000, 9000 + n),)}, {}]
        fixture = entered(kit, wide, [([3] * 5, SamplingParams(max_tokens=2 * n, **given)) for given in params])
        accept(fixture, [[8]] * 4, "a step that ends the prefill")
        rows = accept(
            fixture,
            [[*range(20, 20 + n)], [*[9] * (n - 3), *stops[-1], 9], [*[9] * (n - 2), 8999 + n, 9], [8]],
            f"a step of {n} accepted tokens, {n} stop sequences and {n} end tokens",
        )
        assert [len(row.tokens) for row in rows] == [n, n - 1, n - 1, 1], "the kit's own rows"


@guarantee(9, also=(12, 25))
@pytest.mark.parametrize("drafts", [0, LONG.max_draft_tokens], ids=["plain", "speculative"])
def test_g09_the_last_of_many_stops_ends_a_step_of_one_token(kit: Kit, drafts: int) -> None:
    """Each request has as many end tokens or stop sequences as fit, and only the last of them is met."""
    sizes = replace(LONG, max_draft_tokens=drafts)
    first, last = LONGEST[:-1], LONGEST[-1]
    stops = SamplingParams(max_tokens=60, stop_sequences=(*OTHERS, LONGEST[-2:]))
    ends = SamplingParams(max_tokens=60, eos_token_ids=(*range(100, 99 + sizes.max_eos), 4))
    others = SamplingParams(max_tokens=60)
    fixture = entered(kit, sizes, [([7, 8, *first], stops), ([7, 8], ends), ([7, 8], others)])
    for tokens in ([9, 9, 9], [first[-1], 9, 9], [last, 4, 9]):
        cells = {
            name: fixture.model.cells[name].copy() for name in ("sampled_token_ids", "accept_tokens", "accept_num")
        }
        for name in ("sampled_token_ids", "accept_tokens"):
            cells[name][:3, 0] = tokens
        cells["accept_num"][...] = 1
        fixture.put(cells)
        step = fixture.advance([0, 1, 2], speculative=drafts > 0)
        fixture.check(f"a step that gives {tokens}")
        rows = fixture.output(step)
    found = [row.finish for row in rows]
    assert found == [FinishReason.STOP, FinishReason.STOP, FinishReason.NONE], f"the kit's own rows: {found}"


MANY = StateConfig(
    num_slots=1100, max_model_len=16, block_size=4, max_draft_tokens=9, max_logprobs=0, max_stop_sequences=1
)
"""More slots than a block has threads, and more drafts than a vector of 8."""


@guarantee(12, also=(9,))
def test_g12_drafts_of_a_thousand_slots_are_each_their_own(kit: Kit) -> None:
    params = SamplingParams(max_tokens=12)
    fixture = entered(kit, MANY, [([3, 4], params)] * MANY.num_slots)
    cells = {name: fixture.model.cells[name].copy() for name in ("accept_tokens", "accept_num")}
    cells["accept_tokens"][...] = 60
    cells["accept_num"][...] = 1
    fixture.put(cells)
    fixture.advance(range(MANY.num_slots), speculative=True)
    fixture.check(f"a step of {MANY.num_slots} slots")
    most = MANY.max_draft_tokens
    order = np.random.default_rng(31).permutation(MANY.num_slots).tolist()  # neighbours, and not in rising order
    fixture.draft({slot: [slot * 16 + k for k in range(most - slot % 3)] for slot in order})
    fixture.check(f"drafts of {MANY.num_slots} slots")


FAR = StateConfig(
    num_slots=2, max_model_len=66_000, block_size=64, max_draft_tokens=2, max_logprobs=1, max_stop_length=2
)


@guarantee(9)
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_g09_positions_past_16_bits_are_stepped(kit: Kit, speculative: bool) -> None:
    params = SamplingParams(max_tokens=9)
    fixture = entered(kit, FAR, [([11] * 65_534, params), ([12] * 65_990, params)])
    for at in range(3):
        cells = {
            name: fixture.model.cells[name].copy() for name in ("sampled_token_ids", "accept_tokens", "accept_num")
        }
        for name, value in (("sampled_token_ids", 70 + at), ("accept_tokens", 70 + at), ("accept_num", 2)):
            cells[name][...] = value
        fixture.put(cells)
        step = fixture.advance([0, 1], speculative=speculative)
        fixture.check(f"step {at} at positions past 65,536")
        fixture.output(step)
