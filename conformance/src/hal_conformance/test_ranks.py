"""Groups of ranks in worker processes (G13 to G18): what they agree on, in every mode of decoding, and lost peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hal_core.output.records import SlotStatus
from hal_core.slots.declared import StateField
from hal_core.slots.fields import StateConfig
from hal_core.slots.layout import lay_out
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.forms import MODES
from .harness.guarantees import RANKS, guarantee
from .kit import Draw, Kit, examples
from .ranks import losses as rank_losses
from .ranks import modes as rank_modes
from .ranks import work as rank_work
from .ranks.pool import GROUPS, TIMEOUT
from .ranks.work import Met, Seen

PAIR = ((0, 1),)
SHAPES = pytest.mark.parametrize("groups", [PAIR, GROUPS], ids=["two-ranks", "two-by-two"])
SPLITS = (PAIR, GROUPS, ((1, 0),), ((1, 0), (3, 2)))
"""Groups in the ranks' order: the first named is the source."""
SLACK = 8.0
"""Tolerated seconds beyond the timeout, for a busy machine."""
A_CALL = 2
"""Broadcasts of one state in one example: the second finds the first one's bytes."""
AGREED = ("sampled_token_ids",)
AGREED_WITH_DRAFTS = (*AGREED, "accept_tokens", "accept_num", "step_idx", "stop_flags")
"""The fields that ranks share, by the contract and not by the slot table, which may lack one. Before each broadcast the
ranks differ in all of them, including those that normally differ only after an error."""


def ranks_of(groups: Any) -> list[int]:  # noqa: ANN401 (nested sequences)
    """Return the ranks of all groups."""
    return [rank for group in groups for rank in group]


def assert_well(rank: int, error: Met | None, what: str) -> None:
    """Assert that the rank got no error."""
    __tracebackhide__ = True
    assert error is None, f"rank {rank}: {what} raised {error.kind}: {error.text}" if error else ""


def assert_agreed(rank: int, mine: Seen, source: Seen, size: StateConfig) -> None:
    """Assert that after each broadcast the slice equals the source's, and that not one other byte has changed."""
    __tracebackhide__ = True
    layout = lay_out(size)
    part = layout.groups["broadcast_speculative" if size.max_draft_tokens else "broadcast"]
    agreed = AGREED_WITH_DRAFTS if size.max_draft_tokens else AGREED
    for call, (before, after, theirs) in enumerate(zip(mine.before, mine.after, source.before, strict=True)):
        for name, place in layout.fields.items():
            low, high = place.offset, place.offset + place.stride * size.num_slots
            inside = name in agreed
            got, should = after[low:high], (theirs if inside else before)[low:high]
            whose = "the source's" if inside else "its own of before"
            assert got == should, f"rank {rank}, broadcast {call}: {name} differs from {whose}: {got!r}, not {should!r}"
        outside = after[: part.offset] + after[part.end :]
        assert outside == before[: part.offset] + before[part.end :], f"rank {rank}: bytes outside the slice changed"


@guarantee(13, requires=RANKS)
@examples(0.25)
def test_g13_every_rank_holds_the_sources_fields_byte_for_byte(kit: Kit, draw: Draw) -> None:
    size = draw(sizes(), "sizes")
    groups = draw(st.sampled_from(SPLITS), "groups")
    idle = groups[-1:] if len(groups) > 1 and draw(st.booleans(), "the last group is idle") else ()
    seed = draw(st.integers(0, 99), "seed of the bytes")
    seen = kit.ranks.run(kit.recipe, rank_work.agree, groups, idle, size, seed, A_CALL, ranks=ranks_of(groups))
    for group in groups:
        for rank in group:
            if group in idle:
                assert seen[rank].after == seen[rank].before, f"rank {rank} of the idle group {group} changed"
                continue
            assert_well(rank, seen[rank].error, f"broadcast_tokens of group {group}")
            assert_agreed(rank, seen[rank], seen[group[0]], size)


@guarantee(14, requires=RANKS)
@SHAPES
def test_g14_a_call_is_one_collective_of_fixed_size(kit: Kit, groups: Any) -> None:  # noqa: ANN401 (nested tuples)
    small, large = (
        StateConfig(num_slots=4, max_model_len=tokens, max_draft_tokens=2, max_logprobs=1) for tokens in (8, 64)
    )
    nbytes = set()
    for size in (small, large):
        seen = kit.ranks.run(kit.recipe, rank_work.agree, groups, (), size, 0, 3, ranks=ranks_of(groups))
        for rank, mine in seen.items():
            assert_well(rank, mine.error, "broadcast_tokens")
            assert mine.collectives == [1] * 3, f"rank {rank} made {mine.collectives} collectives in 3 calls"
            nbytes |= set(mine.nbytes)
    assert len(nbytes) == 1, f"broadcasts of states with the same fields to agree on have {sorted(nbytes)} bytes"


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("drafts", [0, 4], ids=["plain", "drafts"])
def test_g14_a_large_slice_is_one_collective_too(kit: Kit, drafts: int) -> None:
    size = StateConfig(num_slots=512, max_model_len=8, max_draft_tokens=drafts, max_logprobs=1)
    seen = kit.ranks.run(kit.recipe, rank_work.agree, PAIR, (), size, 0, 2, ranks=ranks_of(PAIR))
    for rank, mine in seen.items():
        assert_well(rank, mine.error, "broadcast_tokens of 512 slots")
        assert mine.collectives == [1] * 2, f"rank {rank} made {mine.collectives} collectives in 2 calls for 512 slots"
        assert_agreed(rank, mine, seen[0], size)


PLAIN = StateConfig(num_slots=4, max_model_len=16)
DIFFERENCES: dict[str, dict[str, Any]] = {
    "slots": {"sizes": replace(PLAIN, num_slots=5)},
    "a size that no broadcast field has": {"sizes": replace(PLAIN, max_model_len=32)},
    "speculation": {"sizes": replace(PLAIN, max_draft_tokens=2)},
    "element type of a broadcast field": {"types": {"sampled_token_ids": "float64"}},
    "element type of another field": {"types": {"temperature": "int32"}},
    "order of broadcast fields": {"swap": ("accept_num", "step_idx")},
    "order of other fields": {"swap": ("seed", "min_p")},
    "type of a declared field": {"fields": [StateField("bias", "int32", groups="step_input")]},
    "reset value of a declared field": {"fields": [StateField("bias", "float32", reset=1, groups="step_input")]},
    "place of a declared field": {"fields": [StateField("bias", "float32", groups="broadcast")]},
    "name": {"name": "mtp"},
    "source": {"ranks": (1, 0)},
}


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("what", DIFFERENCES)
def test_g14_what_ranks_hold_unequal_is_found_before_the_first_collective(kit: Kit, what: str) -> None:
    answers = kit.ranks.run(kit.recipe, rank_work.disagree, PLAIN, {1: DIFFERENCES[what]}, ranks=[0, 1])
    for rank, (error, unchanged, later) in answers.items():
        assert error is not None, f"rank {rank} continued, though rank 1 has another {what}"
        assert error.kind == "StateUnusable", f"rank {rank} met {error.kind}: {error.text}"
        assert all(error.named), f"rank {rank}: {error.text} names device, hook, argument and cure as {error.named}"
        assert unchanged, f"rank {rank}: a collective wrote to the state, though rank 1 has another {what}"
        assert later is not None, f"rank {rank} may use the state again"
        assert later.kind == "StateUnusable", f"rank {rank} met {later.kind} later: {later.text}"


def assert_found(answer: tuple[Met | None, int, Met | None], rank: int, what: str) -> None:
    """Assert that the rank detected the disagreement, sent no output, and refuses the state."""
    __tracebackhide__ = True
    error, sent, later = answer
    assert error is not None, f"{what}, but rank {rank} continued with another step's tokens"
    assert error.kind == "StateUnusable", f"{what}: rank {rank} met {error.kind}: {error.text}"
    assert sent == 0, f"{what}: rank {rank} sent {sent} records of it"
    assert later is not None, f"{what}: rank {rank} may use the state again"


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("by", ["ticket", "output"])
@pytest.mark.parametrize("who", [0, 1])
def test_g14_a_rank_that_missed_a_broadcast_is_found_by_the_header(kit: Kit, who: int, by: str) -> None:
    answers = kit.ranks.run(kit.recipe, rank_work.skip, who, by, ranks=[0, 1])
    assert_found(answers[1], 1, f"rank {who} missed a broadcast")  # the source's own header is right


@guarantee(14, requires=RANKS)
def test_g14_the_output_of_a_slice_with_another_header_is_not_sent(kit: Kit) -> None:
    answers = kit.ranks.run(kit.recipe, rank_work.tamper, ranks=[0, 1])
    for rank, answer in answers.items():
        assert_found(answer, rank, "the header was overwritten after the broadcast")


@guarantee(15, requires=RANKS)
def test_g15_a_group_of_one_in_a_job_of_several_meets_nobody(kit: Kit) -> None:
    (seen,) = kit.ranks.run(kit.recipe, rank_work.alone, PLAIN, ranks=[1]).values()
    assert_well(1, seen.error, "broadcast_tokens in a group of one")
    assert seen.collectives == [0], f"a group of one made {seen.collectives[0]} collectives"
    assert seen.after == seen.before, "broadcast_tokens in a group of one changed the state"


@guarantee(17, requires=RANKS)
@pytest.mark.parametrize("path", ["plain", "speculative", "top-k", "speculative top-k", "first token"])
@SHAPES
def test_g17_only_the_first_rank_sends_and_all_know_the_same(kit: Kit, groups: Any, path: str) -> None:  # noqa: ANN401
    drafts = 2 if path.startswith("speculative") else 0
    size = StateConfig(num_slots=3, max_model_len=32, max_draft_tokens=drafts, max_logprobs=2)
    answers = kit.ranks.run(kit.recipe, rank_work.decode, groups, size, path, 4, ranks=ranks_of(groups))
    for group in groups:
        first = answers[group[0]]
        for rank in group:
            mine = answers[rank]
            assert_well(rank, mine.error, f"decoding ({path})")
            steps = [step for step, *_ in mine.sent]
            should = list(range(4)) if rank == group[0] else []
            assert steps == should, f"rank {rank} of {group} sent steps {steps}, but should send {should}"
            assert mine.known == first.known, f"rank {rank} knows {mine.known}, but rank {group[0]} {first.known}"
            assert mine.fields == first.fields, f"rank {rank} and rank {group[0]} differ after the last step"
        assert [row[3] for row in first.sent] == first.known, f"rank {group[0]} sent other tokens than its own"
        of = first.known if path.endswith("top-k") else [None] * len(first.known)
        assert first.chosen == of, f"{path}: rank {group[0]} sent log-probabilities of {first.chosen}, not of {of}"
        lost = [names for _, names, status, _ in first.sent if SlotStatus.PREEMPTED in status]
        assert len(lost) == 1, f"one request was preempted, but {len(lost)} records of rank {group[0]} report it"


@guarantee(18, requires=RANKS)
@pytest.mark.parametrize("path", ["plain", "speculative top-k"])
@SHAPES
def test_g18_the_clean_up_happens_on_every_rank_of_real_groups(kit: Kit, groups: Any, path: str) -> None:  # noqa: ANN401
    size = replace(PLAIN, num_slots=2, max_draft_tokens=2 if path.startswith("speculative") else 0)
    answers = kit.ranks.run(kit.recipe, rank_work.decode, groups, size, path, 2, ranks=ranks_of(groups))
    for rank, mine in answers.items():
        assert_well(rank, mine.error, "decoding")
        assert mine.marked, f"rank {rank}: a preemption left no mark to clean up"
        assert mine.cleaned, f"rank {rank} did not clean up last_preempted"


def check_casualty(kit: Kit, groups: Any, victim: int, how: str, lose: Any = rank_losses.lose) -> dict[int, Any]:  # noqa: ANN401
    """Let one rank be lost, hung or absent: only its group gets an error, in time, and other devices continue. Return
    the survivors' answers."""
    __tracebackhide__ = True
    ranks = [rank for rank in ranks_of(groups) if rank != victim]
    with kit.ranks.casualty(kit.recipe, lose, victim, how, groups):
        answers = kit.ranks.collect(ranks)
    for rank, lost in answers.items():
        if not any(rank in group and victim in group for group in groups):
            assert_well(rank, lost.error, f"broadcast {lost.calls}, while rank {victim} of another group was {how},")
            continue
        assert lost.error is not None, f"rank {rank} got no error although rank {victim} was {how}"
        assert lost.error.kind == "GroupLost", f"rank {rank} met {lost.error.kind}: {lost.error.text}"
        assert all(lost.error.named), f"rank {rank}: {lost.error.text} names {lost.error.named}"
        took = lost.error.seconds
        assert took < TIMEOUT + SLACK, f"rank {rank} got the error after {took:.1f} s, but the timeout is {TIMEOUT} s"
        for what, later in (("the same state", lost.again), ("another state", lost.another_state)):
            assert later is not None, f"rank {rank}: a broadcast of {what} goes through on a dead group"
            again = f"rank {rank}: a broadcast of {what} on a dead group"
            assert later.seconds < TIMEOUT, f"{again} took {later.seconds:.1f} s, as if it waited {TIMEOUT} s once more"
        assert_well(rank, lost.rest, "what needs no group")
    return answers


@guarantee(16, requires=RANKS)
@SHAPES
@pytest.mark.parametrize("first", [True, False], ids=["source", "receiver"])
def test_g16_a_hung_rank_is_an_error_on_every_survivor(kit: Kit, groups: Any, first: bool) -> None:  # noqa: ANN401
    check_casualty(kit, groups, groups[-1][0 if first else 1], "hung")


@guarantee(16, requires=RANKS, last=True)
@pytest.mark.parametrize("groups", [GROUPS, PAIR], ids=["two-by-two", "two-ranks"])
def test_g16_a_lost_rank_is_an_error_on_every_survivor(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_casualty(kit, groups, groups[-1][-1], "lost")


@guarantee(13, requires=RANKS)
@pytest.mark.parametrize("groups", [PAIR, GROUPS, ((1, 0),)], ids=["two-ranks", "two-by-two", "reversed"])
@pytest.mark.parametrize("mode", MODES)
def test_g13_ranks_that_draw_apart_agree_in_every_mode(kit: Kit, mode: str, groups: Any) -> None:  # noqa: ANN401
    drafts, verifies, proposes = MODES[mode]
    kinds = verifies if len(verifies) > 1 else 3 * verifies
    size = StateConfig(num_slots=3, max_model_len=32, max_draft_tokens=drafts, max_logprobs=0)
    answers = kit.ranks.run(kit.recipe, rank_modes.step_apart, groups, size, kinds, proposes, ranks=ranks_of(groups))
    for group in groups:
        source = answers[group[0]]
        for rank in group:
            mine = answers[rank]
            assert_well(rank, mine.error, f"decoding ({mode})")
            for number, (got, should) in enumerate(zip(mine.fields, source.fields, strict=True)):
                other = [name for name in should if got[name] != should[name]]
                assert not other, f"{mode}: after step {number} rank {rank} differs from rank {group[0]} in {other}"
            assert mine.known == source.known, f"rank {rank} knows {mine.known}, but rank {group[0]} {source.known}"
        drawn_by = {token // 100 % 10 for tokens in source.known for token in tokens}
        assert drawn_by == {group[0]}, f"{mode}: group {group} has the tokens of ranks {drawn_by}, not of {group[0]}"
