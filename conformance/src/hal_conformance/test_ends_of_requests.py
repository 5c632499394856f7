"""What ends a request, at and beside each limit, however the tokens come: one by one, or several a step (G9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import FinishReason, SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind

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
    asked, params, *_ = CASES[case]
    given: dict[str, Any] = {"prompt": [1, 2], **asked}
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
