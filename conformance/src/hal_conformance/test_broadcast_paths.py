"""The slice of a broadcast among ranks, and the paths that it takes (G13, G14, G16)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hal_core.slots.declared import StateField, table_with
from hal_core.slots.fields import HEADER_BYTES, StateConfig
from hal_core.slots.layout import lay_out

from .harness.guarantees import RANKS, guarantee
from .kit import Kit
from .ranks import paths as rank_paths
from .ranks import slice as rank_slice
from .ranks import work as rank_work
from .ranks.paths import STREAMS, TURNS, InFlight, fields_of
from .ranks.pool import GROUPS
from .ranks.slice import FILLS, Corrupted, Slices
from .test_ranks import PAIR, PLAIN, assert_agreed, assert_well, check_casualty, ranks_of

REVERSED = ((1, 0), (3, 2))
FOURS = (((0, 1, 2, 3),), ((1, 0, 2, 3),), ((2, 3, 1, 0),), ((3, 0, 1, 2),))
"""All four ranks in one group, each of them the source once."""
SHAPES = ((0, 1), (0, 7), (0, 300), (1, 65), (3, 1), (3, 7), (3, 300))
"""Drafts and slots: with and without padding between the fields; slot numbers beyond a byte."""
MANY = tuple(
    StateConfig(num_slots=slots, max_model_len=8, max_draft_tokens=drafts, max_logprobs=1) for drafts, slots in SHAPES
)


def assert_slice(rank: int, mine: Slices, source: Slices, size: StateConfig) -> None:
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


def check_slices(kit: Kit, groups: Any, idle: Any = ()) -> None:  # noqa: ANN401 (nested tuples)
    """Check that each rank of each group holds its source's slice, and that idle groups are unchanged."""
    __tracebackhide__ = True
    seen = kit.ranks.run(kit.recipe, rank_slice.slices, groups, idle, MANY, ranks=ranks_of(groups))
    for group in groups:
        for rank in group:
            for at, size in enumerate(MANY):
                mine = seen[rank][at]
                if group in idle:
                    assert mine.after == mine.before, f"rank {rank} of the idle group {group} changed ({size})"
                    assert all(mine.elsewhere), f"rank {rank} of the idle group {group}: another state changed"
                    continue
                assert_well(rank, mine.error, f"broadcast_tokens of group {group} ({size})")
                assert_slice(rank, mine, seen[group[0]][at], size)


@guarantee(13, requires=RANKS, also=(14,))
@pytest.mark.parametrize("groups", [PAIR, REVERSED, ((0, 1), (3, 2))], ids=str)
def test_g13_the_whole_slice_is_the_sources_and_nothing_else_changes(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_slices(kit, groups)


@guarantee(13, requires=RANKS)
@pytest.mark.parametrize("groups", [GROUPS, REVERSED], ids=str)
def test_g13_a_group_that_does_not_broadcast_is_untouched(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_slices(kit, groups, idle=groups[1:])


@guarantee(13, requires=(RANKS, "four_ranks"), also=(14,))
@pytest.mark.parametrize("groups", FOURS, ids=str)
def test_g13_any_of_four_ranks_is_the_source(kit: Kit, groups: Any) -> None:  # noqa: ANN401
    check_slices(kit, groups)


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
    answers = kit.ranks.run(kit.recipe, rank_slice.corrupt, groups, places, by, "source", ranks=ranks_of(groups))
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


TARGET = StateConfig(num_slots=7, max_model_len=8, max_draft_tokens=3, max_logprobs=1)
DRAFT = StateConfig(num_slots=5, max_model_len=9, max_logprobs=0)
OF_GROUPS = (
    {"target": TARGET, "draft": DRAFT},
    {"target": replace(DRAFT, num_slots=65), "draft": replace(TARGET, max_draft_tokens=1)},
)
"""The sizes of both states, of the first group and of the second."""


def assert_turns(rank: int, mine: InFlight, source: InFlight, sizes: dict[str, StateConfig]) -> None:
    """Assert that each broadcast brought the source's slice of that turn, and changed no other byte."""
    __tracebackhide__ = True
    assert_well(rank, mine.error, "broadcasts that nobody waits for")
    assert mine.collectives == [1] * len(TURNS), (
        f"rank {rank} made {mine.collectives} collectives in {len(TURNS)} calls"
    )
    for turn, name in enumerate(TURNS):
        size = sizes[name]
        layout = lay_out(size, table_with(size, fields_of(size)))
        part = layout.groups["broadcast_speculative" if size.max_draft_tokens else "broadcast"]
        before, after, theirs = mine.before[turn], mine.after[turn], source.before[turn]
        where = f"rank {rank}, broadcast {turn}, of state {name!r}"
        for field, place in layout.fields.items():
            low, high = place.offset, place.offset + place.stride * size.num_slots
            inside = part.offset + HEADER_BYTES <= low < part.end
            got, should = after[low:high], (theirs if inside else before)[low:high]
            assert got == should, f"{where}: {field} is not {'the source' if inside else 'its own'}: {got!r}"
        outside = after[: part.offset] + after[part.end :]
        assert outside == before[: part.offset] + before[part.end :], f"{where}: bytes outside the slice changed"
        untouched, still = mine.others[turn]
        assert untouched == still, f"{where}: the other state changed"


@guarantee(13, requires=RANKS, also=(14,))
@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("groups", [PAIR, GROUPS, REVERSED], ids=["two-ranks", "two-by-two", "reversed"])
def test_g13_broadcasts_in_flight_bring_the_slice_of_their_turn(kit: Kit, groups: Any, streams: str) -> None:  # noqa: ANN401
    """Of states with drafts and without, with declared fields; the second group's are of other sizes."""
    sizes = {group[0]: OF_GROUPS[at] for at, group in enumerate(groups)}
    seen = kit.ranks.run(kit.recipe, rank_paths.in_flight, groups, sizes, streams, ranks=ranks_of(groups))
    for group in groups:
        for rank in group:
            assert_turns(rank, seen[rank], seen[group[0]], sizes[group[0]])


@guarantee(13, requires=(RANKS, "four_ranks"), also=(14,))
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
def test_g13_broadcasts_in_flight_reach_four_ranks(kit: Kit, ranks: tuple[int, ...]) -> None:
    sizes = {ranks[0]: OF_GROUPS[0]}
    seen = kit.ranks.run(kit.recipe, rank_paths.in_flight, (ranks,), sizes, STREAMS[2], ranks=sorted(ranks))
    for rank in ranks:
        assert_turns(rank, seen[rank], seen[ranks[0]], OF_GROUPS[0])


SIZES = {name: replace(PLAIN, **{name: getattr(PLAIN, name) + 1}) for name in PLAIN.__slots__}
FIELD = StateField("bias", "float32", 2, groups="step_input")
FIELDS: dict[str, list[StateField]] = {
    "none": [],
    "another name": [replace(FIELD, name="bios")],
    "another type": [replace(FIELD, dtype="int32")],
    "another width": [replace(FIELD, width=3)],
    "another reset value": [replace(FIELD, reset=1)],
    "other groups": [replace(FIELD, groups="output")],
    "one more": [FIELD, replace(FIELD, name="last")],
}


def assert_all_find(kit: Kit, odd: int, sizes: list[StateConfig], fields: list[list[StateField]], what: str) -> None:
    """Assert that every rank of the group refuses the state."""
    __tracebackhide__ = True
    ranks = range(len(sizes))
    for rank, error in kit.ranks.run(kit.recipe, rank_paths.odd_one, sizes, fields, ranks=[*ranks]).items():
        assert error is not None, f"rank {rank} of {len(sizes)} continued, though rank {odd} has another {what}"
        assert error.kind == "StateUnusable", f"rank {rank} met {error.kind}: {error.text} ({what} of rank {odd})"


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("odd", [0, 1])
def test_g14_each_size_and_field_that_differs_is_found(kit: Kit, odd: int) -> None:
    for name, size in SIZES.items():
        sizes = [PLAIN, PLAIN]
        sizes[odd] = size
        assert_all_find(kit, odd, sizes, [[FIELD], [FIELD]], name)
    for what, other in FIELDS.items():
        fields = [[FIELD], [FIELD]]
        fields[odd] = other
        assert_all_find(kit, odd, [PLAIN, PLAIN], fields, f"declared fields: {what}")


@guarantee(14, requires=(RANKS, "four_ranks"))
@pytest.mark.parametrize("odd", range(4))
def test_g14_one_of_four_that_differs_is_found_by_all(kit: Kit, odd: int) -> None:
    sizes, fields = [PLAIN] * 4, [[FIELD]] * 4
    sizes[odd] = SIZES["max_bad_words"]
    assert_all_find(kit, odd, sizes, fields, "size")
    fields = [*fields[:odd], FIELDS["another reset value"], *fields[odd + 1 :]]
    assert_all_find(kit, odd, [PLAIN] * 4, fields, "reset value")


PLACES = (0, 5, 12, 16, 20, 31, 40, 63)
"""Bytes of the header."""


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize("by", ["ticket", "output"])
@pytest.mark.parametrize("where", ["source", "receiver"])
def test_g14_the_header_of_a_state_with_drafts_is_compared_too(kit: Kit, where: str, by: str) -> None:
    answers = kit.ranks.run(kit.recipe, rank_slice.corrupt, PAIR, PLACES, by, where, 2, ranks=ranks_of(PAIR))
    for rank, found in answers.items():
        for at, one in zip(PLACES, found, strict=True):
            if where == "source" or rank == PAIR[0][-1]:
                assert_corrupted(rank, one, f"byte {at} of the header was wrong (looked at by {by})", by)
            else:
                assert_well(rank, one.error, "a broadcast whose header was wrong on another rank")


@guarantee(14, requires=RANKS)
@pytest.mark.parametrize(("who", "times"), [(0, 256), (1, 256), (1, 2**16), (0, 2**32)])
def test_g14_a_rank_that_is_many_steps_ahead_is_found_by_the_header(kit: Kit, who: int, times: int) -> None:
    """By as many as one, two and four bytes count."""
    answers = kit.ranks.run(kit.recipe, rank_slice.stray, who, "output", times, ranks=[0, 1])
    assert_corrupted(1, answers[1], f"rank {who} was {times} steps ahead")


SMALL = {"max_model_len": 2, "max_logprobs": 0, "max_eos": 1, "max_stop_sequences": 1, "max_stop_length": 1}
LARGE = (
    StateConfig(num_slots=9_000, max_draft_tokens=7, max_bad_words=1, **SMALL),
    StateConfig(num_slots=66_000, max_bad_words=1, **SMALL),
)
"""Slices of half a megabyte and more."""


@guarantee(13, requires=RANKS, also=(14,))
@pytest.mark.parametrize("size", LARGE, ids=["drafts", "plain"])
def test_g13_slices_of_half_a_megabyte_arrive_to_their_last_byte(kit: Kit, size: StateConfig) -> None:
    seen = kit.ranks.run(kit.recipe, rank_work.agree, PAIR, (), size, 3, 2, ranks=ranks_of(PAIR))
    for rank, mine in seen.items():
        assert_well(rank, mine.error, f"broadcast_tokens of {size.num_slots} slots")
        assert mine.collectives == [1] * 2, f"rank {rank} made {mine.collectives} collectives in 2 calls"
        assert_agreed(rank, mine, seen[0], size)


@guarantee(16, requires=RANKS, also=(17,))
@pytest.mark.parametrize(("groups", "victim"), [(PAIR, 1), (PAIR, 0), (GROUPS, 3)], ids=["receiver", "source", "pairs"])
def test_g16_a_rank_that_hangs_between_steps_is_told_by_the_output(kit: Kit, groups: Any, victim: int) -> None:  # noqa: ANN401
    check_steps_lost(kit, groups, victim, "hung")


@guarantee(16, requires=RANKS, also=(17,), last=True)
def test_g16_a_rank_that_is_lost_between_steps_is_told_by_the_output(kit: Kit) -> None:
    check_steps_lost(kit, PAIR, 0, "lost")


def check_steps_lost(kit: Kit, groups: Any, victim: int, how: str) -> None:  # noqa: ANN401 (nested tuples)
    """Let one rank hang or be lost between steps with drafts, on a stream of its own; no step of its group is sent."""
    __tracebackhide__ = True
    answers = check_casualty(kit, groups, victim, how, rank_paths.lose_in_a_step)
    for rank, lost in answers.items():
        group = next(group for group in groups if rank in group)
        should = lost.calls if rank == group[0] else 0
        assert lost.sent == should, f"rank {rank} sent {lost.sent} steps, but {should} went well"
