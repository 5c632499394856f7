"""Values out of bounds (G21): tokens outside the vocabulary and counts, at each place of a row and in several rows; and
the reports of a slot after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.output.records import SlotStatus
from hal_core.slots.fields import FinishReason, SplitRole, StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskKind
from hypothesis import strategies as st

from .fixtures.world import World, assert_rows
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
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
    failed = [row.request_id for row in should if row.status is SlotStatus.ERROR]
    assert failed == [f"r{case.slot}"], f"the kit's own rows report errors of {failed}"
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


MOST, COLUMNS = SIZES.max_accept, SIZES.max_logprobs + 1
TOKENS = [("tokens", at, 0) for at in range(MOST)]
ALTERNATIVES = [("topk_token_ids", at, 1) for at in range(MOST)]
DRAFTS = [("draft_tokens", at, 0) for at in range(SIZES.max_draft_tokens)]
PATHS: dict[str, tuple[bool, int | None, SplitRole, list[tuple[str, int, int]]]] = {
    "plain": (False, None, SplitRole.MIXED, TOKENS[:1]),
    "plain with alternatives": (False, 1, SplitRole.DECODE, [*TOKENS[:1], *ALTERNATIVES[:1]]),
    "speculative": (True, None, SplitRole.MIXED, TOKENS),
    "speculative with alternatives": (True, 1, SplitRole.MIXED, [*TOKENS, *ALTERNATIVES]),
    "first tokens with drafts": (True, None, SplitRole.PREFILL, [*TOKENS[:1], *DRAFTS]),
    "first tokens with drafts and alternatives": (True, 1, SplitRole.PREFILL, [*ALTERNATIVES[:1], *DRAFTS]),
}
"""Whether the step verifies drafts, its log-probabilities, the role, and each place of a row that holds a token id."""
WHERE = ((0,), (1,), (2,), (0, 2), (0, 1, 2))
"""The slots whose rows hold the strange id."""


def sampled(fixture: World, place: str, at: int, column: int, slots: Sequence[int], strange: int) -> None:
    """Write the ends of the vocabulary everywhere, and a strange id at one place of some rows."""
    ids = np.zeros((3, MOST, COLUMNS), np.int64)
    ids[:, ::2], ids[1] = VOCABULARY - 1, VOCABULARY - 1
    ids[2, :, 1] = -1  # an alternative that is missing
    if place == "tokens":
        ids[list(slots), at, 0] = strange
    elif place == "topk_token_ids":
        ids[list(slots), at, column] = VOCABULARY if strange == -1 else strange
    arrive(fixture.sample(ids))


@guarantee(21)
@pytest.mark.parametrize("path", PATHS)
def test_g21_a_strange_token_is_found_at_each_place_of_a_row(kit: Kit, path: str) -> None:
    """The last and the first id of the vocabulary are none; of several such rows each is an error."""
    speculative, logprobs, role, places = PATHS[path]
    values = 0
    for place, at, column in places:
        for slots in WHERE:
            fixture, strange = filled(kit, role), STRANGE[values % len(STRANGE)]
            values += 1
            sampled(fixture, place, at, column, slots, strange)
            step = fixture.advance(ORDER, speculative=speculative, logprobs=logprobs)
            if role is SplitRole.PREFILL:
                drafts = np.full((3, SIZES.max_draft_tokens), VOCABULARY - 1, np.int64)
                drafts[list(slots) if place == "draft_tokens" else [], at % SIZES.max_draft_tokens] = strange
                counts = np.full(3, SIZES.max_draft_tokens, np.int32)
                fixture.put({"draft_num": counts, "draft_tokens": drafts})
            should = fixture.rows_of(step)
            failed = {row.request_id for row in should if row.status is SlotStatus.ERROR}
            assert failed == {f"r{slot}" for slot in slots}, f"the kit's own rows report errors of {failed}"
            fixture.output(step)


@guarantee(21, also=(19,))
@pytest.mark.parametrize("way", [TaskKind.PREEMPTED, TaskKind.ABORTED, None], ids=["preempted", "aborted", "released"])
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_g21_the_next_request_in_the_slot_of_an_error_is_told(
    kit: Kit, way: TaskKind | None, speculative: bool
) -> None:
    """The errors of rows 0 and 2 end with their requests; the next ones' tokens are theirs, from position 0."""
    fixture = filled(kit, SplitRole.MIXED)
    sampled(fixture, "tokens", 0, 0, (0, 2), VOCABULARY)
    fixture.output(fixture.advance(ORDER, speculative=speculative))
    gone = fixture.leaving((0, 2), way) if way else []
    if not gone:
        fixture.release([0, 2])
    fixture.enter([*gone, *map(fixture.entering, (2, 0))])
    for _ in range(2):
        sampled(fixture, "", 0, 0, (), 0)
        rows = fixture.output(fixture.advance(ORDER, speculative=speculative))
        given = [row.request_id for row in rows if row.tokens]
        assert len(given) == 3, f"the kit's own rows have tokens of {given}"


FAR = (MOST + 1, -1, 2**31 - 1, -(2**31))
COUNTS = {
    "accepted, far": ("accept_num", FAR, True),
    "accepted, by a plain step": ("accept_num", (2, -1, 2**31 - 1), False),
    "drafts": ("draft_num", (SIZES.max_draft_tokens + 1, -1, 2**30, -(2**31)), True),
    "drafts of a plain step": ("draft_num", (SIZES.max_draft_tokens + 1, -1, 2**30), False),
    "fewer generated than given": ("step_idx", (0, -1, -(2**31)), True),
}
"""The field that a kernel writes out of bounds after the step has advanced, values, and the kind of the step."""


@guarantee(21, also=(24,))
@pytest.mark.parametrize("what", COUNTS)
def test_g21_a_count_out_of_bounds_is_an_error_of_each_row_that_has_it(kit: Kit, what: str) -> None:
    name, values, speculative = COUNTS[what]
    for turn, value in enumerate(values):
        for slots in WHERE[turn % 2 :: 2]:
            fixture = filled(kit, SplitRole.MIXED)
            sampled(fixture, "", 0, 0, (), 0)
            step = fixture.advance(ORDER, speculative=speculative, logprobs=1 if turn % 2 else None)
            for slot in slots:
                fixture.poke_cell(name, slot, value)
            should = fixture.rows_of(step)
            failed = {row.request_id for row in should if row.status is SlotStatus.ERROR}
            assert failed == {f"r{slot}" for slot in slots}, f"the kit's own rows report errors of {failed}"
            refused(fixture, step, should, [f"r{slot}" for slot in slots])


def refused(fixture: World, step: Step, should: list[Row], named: Sequence[str]) -> None:
    """Assert that the ticket raises and names these requests, and that the record has all rows."""
    __tracebackhide__ = True
    sink, what = KeepingSink(), f"save_output of step {step.number}"
    ticket = assert_no_error(lambda: fixture.save(step, sink), what)
    (record,) = sink.resolve_all()
    assert_rows(record, should, step.number)
    error = assert_raises(InvalidValue, lambda: ticket.wait(PATIENCE), "waiting for output out of bounds")
    assert_says(error, device=fixture.bound.name, hook="save_output")
    missing = [name for name in named if name not in str(error)]
    assert not missing, f"the error does not name {missing}: {error}"
    fixture.check(what)


@guarantee(21, also=(19, 22))
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
def test_g21_a_slot_that_holds_another_admission_gives_no_tokens(kit: Kit, speculative: bool) -> None:
    """A kernel wrote over the slot's admission: its tokens may be those of another request."""
    fixture = filled(kit, SplitRole.MIXED)
    sampled(fixture, "", 0, 0, (), 0)
    step = fixture.advance(ORDER, speculative=speculative)
    fixture.poke_cell("request_serial", 1, fixture.model.get("request_serial", 1) + 1)
    should = fixture.rows_of(step)
    for at, row in enumerate(should):
        if row.request_id == "r1":
            generated = fixture.model.get("step_idx", 1)
            should[at] = Row("r1", SlotStatus.ERROR, FinishReason.ERROR, generated, message=None)
    refused(fixture, step, should, ["r1"])
