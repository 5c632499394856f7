"""``set_drafts`` in every form of its argument, again and again, for two states by turns (G12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.world import World
from .harness.asserts import assert_no_error
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit

SIZES = StateConfig(num_slots=10, max_model_len=64, block_size=8, max_draft_tokens=5, max_logprobs=0)
Drafts = Mapping[int, Sequence[int]]

FORMS: dict[str, Callable[[Drafts], Any]] = {
    "lists": lambda given: {slot: list(row) for slot, row in given.items()},
    "tuples": lambda given: {slot: tuple(row) for slot, row in given.items()},
    "int64 arrays": lambda given: {slot: np.array(row, np.int64) for slot, row in given.items()},
    "int32 arrays": lambda given: {slot: np.array(row, np.int64).astype(np.int32) for slot, row in given.items()},
    "strided arrays": lambda given: {slot: np.repeat(np.array(row, np.int64), 3)[::3] for slot, row in given.items()},
    "slots of NumPy": lambda given: {np.int32(slot): list(row) for slot, row in given.items()},
    "numbers of NumPy": lambda given: {slot: [np.int64(one) for one in row] for slot, row in given.items()},
    "a mapping that is no dict": lambda given: MappingProxyType({slot: list(row) for slot, row in given.items()}),
    "slots in falling order": lambda given: {slot: list(given[slot]) for slot in sorted(given, reverse=True)},
}
TURNS: tuple[dict[int, tuple[int, ...]], ...] = (
    {0: (1, 2, 3, 4, 5), 7: (6,), 3: (), 9: (8, 9), 4: (2**31 - 1, 0)},
    {9: (3, 4, 5, 6, 7), 0: (8,)},
    {},
    {slot: tuple(range(slot, slot + 1 + slot % 5)) for slot in (2, 5, 0, 9, 1, 8, 3, 7, 6, 4)},
    {3: (), 4: ()},
    {4: (0,), 8: (1, 1, 1, 1, 1)},
)
"""The drafts of six steps: full rows, then shorter and longer ones, none, those of all slots, and those of two."""


def running(kit: Kit, name: str) -> World:
    """Return a state whose slots all decode."""
    fixture = World(kit, SIZES, name=name)
    fixture.enter(fixture.entering(slot, [slot, 1, 2], max_tokens=50) for slot in range(SIZES.num_slots))
    return fixture


def advance(fixture: World, turn: int) -> None:
    """Run a step that accepts one to three tokens of each slot, and compare its output."""
    n, most = SIZES.num_slots, SIZES.max_accept
    tokens = 1000 * (turn + 1) + 10 * np.arange(n)[:, None] + np.arange(most)
    fixture.put({"accept_tokens": tokens, "accept_num": 1 + (np.arange(n) + turn) % 3})
    step = fixture.advance(range(n), speculative=True)
    fixture.check(f"step {turn}")
    fixture.output(step)


@guarantee(12, also=(9, 10, 11))
@pytest.mark.parametrize("form", FORMS)
def test_g12_drafts_have_the_same_effect_in_every_form(kit: Kit, form: str) -> None:
    """Step by step, in two states by turns; the caller's arrays change once the call has returned."""
    fixtures = [running(kit, name) for name in ("target", "other")]
    for turn, _ in enumerate(TURNS):
        for at, fixture in enumerate(fixtures):
            advance(fixture, turn)
            rows = TURNS[(turn + at) % len(TURNS)]
            given = FORMS[form](rows)
            call = {"state": fixture.state, "step": fixture.advanced, "drafts": given, "stream": fixture.stream}
            told = f"drafts {rows} as {form}"
            before = fixture.bound.counters()
            ticket = assert_no_error(lambda: fixture.bound.set_drafts(**call), told)  # noqa: B023
            cost = (fixture.bound.counters() - before).submissions
            assert cost <= 2 or not kit.capabilities.fused_scatter, f"{told}: {cost} submissions, at most 2 are due"
            for row in given.values():
                if isinstance(row, np.ndarray):
                    row[...] = -9
            fixture.model.hand(rows)
            arrive(ticket, told)
            fixture.check(told)


@guarantee(12, also=(11,))
def test_g12_rows_of_drafts_are_their_own_requests_alone_from_turn_to_turn(kit: Kit) -> None:
    """Requests leave with full rows, others enter with fewer drafts, and get more or fewer by the next step."""
    fixture = running(kit, "target")
    for turn in range(5):
        advance(fixture, turn)
        fixture.draft({slot: [7 + turn] * (1 + (slot + turn) % 5) for slot in range(0, 10, 1 + turn % 2)})
        fixture.check(f"drafts of step {turn}")
        slots = [(turn + k) % 10 for k in (0, 3, 7)]
        params = SamplingParams(max_tokens=50)
        new = [fixture.admit(Request(fixture.new_name(), [slot, 5], params)) for slot in slots]
        tasks = [
            Task(TaskKind.REMOTE_PREFILL, slot, one, 2, 0, [slot], first_token=turn, drafts=[9] * ((slot + turn) % 6))
            for slot, one in zip(slots, new, strict=True)
        ]
        fixture.enter([*fixture.leaving(slots, TaskKind.ABORTED), *tasks])
        fixture.check(f"handoffs after step {turn}")
