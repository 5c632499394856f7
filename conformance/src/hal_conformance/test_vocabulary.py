"""``save_output``: a token outside the vocabulary is its request's error (G21), in any field."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hal_core.output.records import SlotStatus
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.step import Step
from hypothesis import strategies as st

from .fixtures.world import World, assert_rows
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .oracle.output import Row

VOCABULARY = 50
SIZES = StateConfig(
    num_slots=3, max_model_len=16, block_size=2, max_draft_tokens=2, max_logprobs=1, vocab_size=VOCABULARY
)
STRANGE = (VOCABULARY, -1, -2, 2**31, 2**32 + 1, 2**63 - 1, -(2**63))
"""Values outside that vocabulary; an alternative may be -1."""
ORDER = (2, 0, 1)


@dataclass
class Case:
    """A step that gives each of three requests a token, and reports an invalid id for the one in ``slot``."""

    role: SplitRole
    speculative: bool
    logprobs: int | None
    place: str
    slot: int
    strange: int

    @property
    def source(self) -> str:
        """The field of the step's tokens."""
        return "accept_tokens" if self.speculative else "sampled_token_ids"

    def sample(self, fixture: World) -> None:
        """Write the fields that the step's kernels write before it advances."""
        ids = np.arange(18, dtype=np.int64).reshape(3, 3, 2)
        if self.place == self.source:
            ids[self.slot, 0, 0] = self.strange
        elif self.place == "topk_token_ids":
            ids[self.slot, 0, 1] = self.strange
        arrive(fixture.sample(ids, [1] * 3, speculative=self.speculative))

    def draft(self, fixture: World) -> None:
        """Write the drafts of a prefill node, one for each request."""
        drafts = np.full((3, 2), 5, np.int64)
        drafts[self.slot] = self.strange
        fixture.put({"draft_num": np.ones(3, np.int32), "draft_tokens": drafts})


def draw_case(draw: Draw) -> Case:
    """Return any kind of step, and any field with token ids in its record."""
    role = draw(st.sampled_from(SplitRole), "role")
    prefill = role is SplitRole.PREFILL
    speculative, logprobs = prefill or draw(st.booleans(), "speculative"), draw(st.sampled_from([None, 1]), "logprobs")
    places = ["accept_tokens" if speculative else "sampled_token_ids"]
    places += ["topk_token_ids"] * (logprobs is not None) + ["draft_tokens"] * prefill
    place, slot = draw(st.sampled_from(places), "field"), draw(st.integers(0, 2), "slot")
    strange = draw(st.sampled_from([one for one in STRANGE if place != "topk_token_ids" or one != -1]), "token")
    return Case(role, speculative, logprobs, place, slot, strange)


def filled(kit: Kit, role: SplitRole) -> World:
    """Return a state with three requests whose prompts the next step ends."""
    fixture = World(kit, SIZES)
    fixture.enter(fixture.entering(slot, name=f"r{slot}", role=role, logprobs=1) for slot in range(3))
    return fixture


def save(fixture: World, step: Step, should: list[Row]) -> None:
    """Assert that the ticket raises no error, and that the record is right."""
    __tracebackhide__ = True
    arrive(fixture.save(step))
    assert_rows(fixture.sink.records[-1], should)


@guarantee(21)
@examples()
def test_g21_a_token_outside_the_vocabulary_is_its_requests_error(kit: Kit, draw: Draw) -> None:
    case = draw_case(draw)
    fixture = filled(kit, case.role)
    case.sample(fixture)
    step = fixture.advance(ORDER, speculative=case.speculative, logprobs=case.logprobs)
    if case.place == "draft_tokens":
        case.draft(fixture)
    should = fixture.rows_of(step)
    told = [row.request_id for row in should if row.status is SlotStatus.ERROR]
    assert told == [f"r{case.slot}"], f"the kit's own rows report errors of {told}"
    save(fixture, step, should)


@guarantee(21)
@examples(0.5)
def test_g21_nothing_more_is_told_of_a_request_after_that_error(kit: Kit, draw: Draw) -> None:
    """A worker learns of it with the record; the next step may be in flight by then."""
    speculative, slot = draw(st.booleans(), "speculative"), draw(st.integers(0, 2), "slot")
    case = Case(SplitRole.MIXED, speculative, None, "", slot, draw(st.sampled_from(STRANGE), "token"))
    case.place = case.source
    fixture = filled(kit, case.role)
    case.sample(fixture)
    first = fixture.advance(ORDER, speculative=speculative)
    save(fixture, first, fixture.rows_of(first))
    case.place = ""
    case.sample(fixture)
    second = fixture.advance(ORDER, speculative=speculative)
    should, silent = fixture.rows_of(second), Row(f"r{slot}", position=fixture.model.get("step_idx", slot))
    assert silent in should, f"the kit's own rows are {should}"
    save(fixture, second, should)
