"""The whole slice of ``broadcast_tokens``, from any rank (G13), its header (G14), and absent peers (G16)."""

from __future__ import annotations

from typing import Any

import pytest
from hal_core.slots.fields import HEADER_BYTES, StateConfig
from hal_core.slots.layout import lay_out

from .harness.guarantees import RANKS, guarantee
from .kit import Kit
from .ranks import slice as rank_slice
from .ranks.pool import GROUPS
from .ranks.slice import FILLS, Corrupted, Slices
from .test_ranks import PAIR, assert_well, check_casualty, told

REVERSED = ((1, 0), (3, 2))
FOURS = (((0, 1, 2, 3),), ((1, 0, 2, 3),), ((2, 3, 1, 0),), ((3, 0, 1, 2),))
"""All four ranks in one group, each of them the source once."""
SHAPES = ((0, 1), (0, 7), (0, 300), (1, 65), (3, 1), (3, 7), (3, 300))
"""Drafts and slots: with and without padding between the fields; slot numbers beyond a byte."""
MANY = tuple(
    StateConfig(num_slots=slots, max_model_len=8, max_draft_tokens=drafts, max_logprobs=1) for drafts, slots in SHAPES
)


def assert_whole(rank: int, mine: Slices, source: Slices, size: StateConfig) -> None:
    """Assert that after each broadcast the slice equals the source's, including header and padding, and all else is
    unchanged."""
    __tracebackhide__ = True
    layout = lay_out(size)
    part = layout.groups["broadcast_speculative" if size.max_draft_tokens else "broadcast"]
    assert len(mine.after) == len(FILLS), f"rank {rank} made {len(mine.after)} broadcasts of {len(FILLS)} ({size})"
    headers = set()
    for call, (before, after, sent) in enumerate(zip(mine.before, mine.after, source.before, strict=True)):
        where = f"rank {rank}, broadcast {call} of {size.num_slots} slots with {size.max_draft_tokens} drafts"
        got, should = after[part.offset + HEADER_BYTES : part.end], sent[part.offset + HEADER_BYTES : part.end]
        wrong = [at for at, (one, other) in enumerate(zip(got, should, strict=True)) if one != other]
        assert not wrong, (
            f"{where}: {len(wrong)} bytes of the slice are not the source's: {named(layout, part, wrong[0])}"
        )
        header = after[part.offset : part.offset + HEADER_BYTES]
        assert header == source.after[call][part.offset : part.offset + HEADER_BYTES], f"{where}: another header"
        headers.add(header)
        outside = after[: part.offset] + after[part.end :]
        assert outside == before[: part.offset] + before[part.end :], f"{where}: bytes outside the slice changed"
        assert mine.elsewhere[call], f"{where}: another state, or memory that belongs to none, changed"
    assert len(headers) == len(FILLS), f"rank {rank}: {len(FILLS)} broadcasts had {len(headers)} headers"


def named(layout: Any, part: Any, at: int) -> str:  # noqa: ANN401 (a layout and a range)
    """Return the field and slot of a byte of the slice."""
    byte = part.offset + HEADER_BYTES + at
    for name, place in layout.fields.items():
        if place.offset <= byte < place.offset + place.stride * layout.sizes.num_slots:
            return f"the first is in {name}[{(byte - place.offset) // place.stride}]"
    return f"the first is padding, {at} bytes past the header"


def check_whole(kit: Kit, groups: Any, idle: Any = ()) -> None:  # noqa: ANN401 (nested tuples)
    """Check that each rank of each group holds its source's slice, and that idle groups are unchanged."""
    __tracebackhide__ = True
    seen = kit.ranks.run(kit.recipe, rank_slice.whole, groups, idle, MANY, ranks=told(groups))
    for group in groups:
        for rank in group:
            for at, size in enumerate(MANY):
                mine = seen[rank][at]
                if group in idle:
                    assert mine.after == mine.before, f"rank {rank} of the idle group {group} changed ({size})"
                    assert all(mine.elsewhere), f"rank {rank} of the idle group {group}: another state changed"
                    continue
                assert_well(rank, mine.error, f"broadcast_tokens of group {group} ({size})")
                assert_whole(rank, mine, seen[group[0]][at], size)


@guarantee(13, requires=RANKS, also=(14,))
@pytest.mark.parametrize("groups", [PAIR, REVERSED, ((0, 1), (3, 2))], ids=str)
def test_g13_the_whole_slice_is_the_sources_and_nothing_else_changes(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_whole(kit, groups)


@guarantee(13, requires=RANKS)
@pytest.mark.parametrize("groups", [GROUPS, REVERSED], ids=str)
def test_g13_a_group_that_does_not_broadcast_is_untouched(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_whole(kit, groups, idle=groups[1:])


@guarantee(13, requires=(RANKS, "whole_group"), also=(14,))
@pytest.mark.parametrize("groups", FOURS, ids=str)
def test_g13_any_of_four_ranks_is_the_source(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_whole(kit, groups)


def assert_corrupted(rank: int, found: Corrupted, what: str, by: str = "output") -> None:
    """Assert that the rank got the error, sent no output, and that every hook refuses the state.

    ``by``: the "ticket" of the broadcast has raised it, or the "output" at the latest.
    """
    __tracebackhide__ = True
    assert_well(rank, found.before, f"the step before {what}")
    assert found.error is not None, f"{what}, but rank {rank} continued"
    assert found.error.kind == "StateUnusable", f"{what}: rank {rank} met {found.error.kind}: {found.error.text}"
    assert all(found.error.named), f"{what}: rank {rank}: {found.error.text} names {found.error.named}"
    assert by == "output" or not found.passed, f"{what}: the broadcast's ticket told rank {rank} nothing of it"
    assert found.sent == 0, f"{what}: rank {rank} sent {found.sent} records of that step"
    usable = [hook for hook, kind in found.later.items() if kind != "StateUnusable"]
    assert not usable, f"{what}: rank {rank} may use the state again, by {usable} (each call met {found.later})"


ALL = tuple(range(HEADER_BYTES))
HEADERS = (
    (PAIR, "ticket", ALL),
    (PAIR, "output", ALL[::3]),
    (((1, 0),), "output", ALL[1::5]),
    (REVERSED, "ticket", ALL[::9]),
)
"""Groups, the check of their ranks (ticket or output), and the wrong bytes of the header."""


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize(("groups", "by", "places"), HEADERS, ids=["pair", "pair-output", "reversed", "two-by-two"])
def test_g14_every_byte_of_the_header_is_compared_on_every_rank(kit: Kit, groups: Any, by: str, places: Any) -> None:  # noqa: ANN401
    answers = kit.ranks.run(kit.recipe, rank_slice.corrupt, groups, places, by, "source", ranks=told(groups))
    for rank, found in answers.items():
        assert len(found) == len(places), f"rank {rank} tried {len(found)} of {len(places)} wrong headers"
        for at, one in zip(places, found, strict=True):
            assert_corrupted(rank, one, f"byte {at} of the header was wrong (looked at by {by})", by)
        assert_well(rank, found[-1].another, "a new state of a group that had met wrong headers")


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("by", ["ticket", "output"])
def test_g14_a_header_that_is_wrong_on_one_receiver_alone_is_found_there(kit: Kit, by: str) -> None:
    places = [0, 9, 16, 17, 23, 24, 31, 32, 47, 63]
    answers = kit.ranks.run(kit.recipe, rank_slice.corrupt, PAIR, places, by, "receiver", ranks=[0, 1])
    for at, one in zip(places, answers[1], strict=True):
        assert_corrupted(1, one, f"byte {at} of the header arrived wrong (looked at by {by})", by)
    for one in answers[0]:
        assert_well(0, one.error, "a broadcast whose header was wrong on another rank")


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("by", ["ticket", "output"])
@pytest.mark.parametrize("who", [0, 1])
def test_g14_a_rank_that_is_a_step_ahead_is_found_by_the_header(kit: Kit, who: int, by: str) -> None:
    answers = kit.ranks.run(kit.recipe, rank_slice.stray, who, by, ranks=[0, 1])
    assert_corrupted(
        1, answers[1], f"rank {who} was a step ahead (checked by {by})", by
    )  # the source's own header is right


@guarantee(16, requires=RANKS, also=(14,))
@pytest.mark.parametrize(
    ("groups", "victim", "how"),
    [(PAIR, 0, "opening"), (PAIR, 1, "opening"), (GROUPS, 3, "opening"), (GROUPS, 2, "first"), (PAIR, 1, "third")],
    ids=["source", "receiver", "two-by-two", "first", "third"],
)
def test_g16_a_peer_that_lives_and_never_joins_is_an_error_in_time(
    kit: Kit,
    groups: Any,  # noqa: ANN401 (nested tuples)
    victim: int,
    how: str,
) -> None:
    check_casualty(kit, groups, victim, how, rank_slice.absent)
