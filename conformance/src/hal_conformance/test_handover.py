"""Handovers of a cache's blocks (G29 to G32), one and several at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.handover.facts import FACTS as LABELS
from hal_core.handover.messages import Blocks, Seal
from hal_core.handover.protocol import Arrived, Cancelled, Handover, HandoverKey, PeerLost, Rejected
from hypothesis import strategies as st

from .fixtures.kv_handover import BLOCKS, FACTS, SHORT, KvHandover, ends, kinds
from .harness.asserts import assert_raises
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples

KEY = HandoverKey("r", 0)
SENT, PROMISED = [5, 2, 7], [1, 3, 4]


@guarantee(29)
@examples()
def test_g29_blocks_arrive_whole_where_they_were_promised(kit: Kit, draw: Draw) -> None:
    sent = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True), "blocks sent")
    promised = draw(st.permutations(range(BLOCKS)), "blocks promised")[: len(sent)]
    cuts = sorted(draw(st.sets(st.integers(1, len(sent))), "where the chunks end"))
    with KvHandover(kit) as transfers:
        transfers.reserve(KEY, promised)
        for first, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            transfers.send(KEY, first, sent[first:end])
            transfers.look(1)
        handover = transfers.seal(KEY, len(sent))
        transfers.until(lambda: bool(transfers.d.events), "the end of a handover that was sealed")
        assert transfers.d.events == [Arrived(KEY, handover)], f"the decode side got {transfers.d.events}"
        transfers.check_moved(sent, promised)
        transfers.until(lambda: bool(transfers.p.events), "the prefill side's word that all has arrived")
        assert transfers.p.events == [Arrived(KEY, handover)], f"the prefill side got {transfers.p.events}"


@guarantee(29)
def test_g29_nothing_has_arrived_before_its_seal(kit: Kit) -> None:
    with KvHandover(kit) as transfers:
        transfers.reserve(KEY, PROMISED)
        transfers.send(KEY, 0, SENT)
        transfers.look(50)
        assert transfers.d.events == [], f"all blocks came without a seal, but the events are {transfers.d.events}"
        transfers.seal(KEY, 3)
        transfers.until(lambda: bool(transfers.d.events), "the end of a handover that was sealed")
        assert kinds(transfers.d.events) == [Arrived]


@guarantee(29)
@pytest.mark.parametrize("says", [1, 3, 4])
def test_g29_a_seal_of_another_count_is_no_arrival(kit: Kit, says: int) -> None:
    with KvHandover(kit) as transfers:
        transfers.reserve(KEY, [*PROMISED, 0])
        transfers.send(KEY, 0, SENT[:2])
        try:
            transfers.seal(KEY, says)
        except InvalidValue:
            return  # the sender's own side has noticed it
        transfers.until(
            lambda: bool(transfers.d.events and transfers.p.events), "the end of a handover with a wrong seal"
        )
        text = f"2 blocks came, the seal states {says}, but the events are"
        assert kinds(transfers.d.events) == [Rejected], f"{text} {transfers.d.events}"
        assert kinds(transfers.p.events) == [Rejected], f"{text} {transfers.p.events} on the prefill side"


def _flip(_: Blocks, data: bytearray) -> None:
    data[len(data) // 2] ^= 4


def _short(_: Blocks, data: bytearray) -> None:
    del data[-1]


def _further(message: Blocks, _: bytearray) -> None:
    message.first += 1


def _first_token(message: Seal, _: bytearray) -> None:
    message.first_token += 1


def _state(message: Seal, _: bytearray) -> None:
    message.state = b"other"


CHANGES: list[tuple[type, Callable[[Any, bytearray], None]]] = [
    (Blocks, _flip),
    (Blocks, _short),
    (Blocks, _further),
    (Seal, _first_token),
    (Seal, _state),
]


@guarantee(29, requires="messages")
@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=lambda one: one.__name__.strip("_"))
def test_g29_what_was_changed_on_its_way_is_no_arrival(
    kit: Kit, kind: type, change: Callable[[Any, bytearray], None]
) -> None:
    with KvHandover(kit) as transfers:
        transfers.change(kind, change)
        transfers.reserve(KEY, PROMISED)
        transfers.send(KEY, 0, SENT)
        transfers.seal(KEY, 3)
        transfers.until(
            lambda: bool(transfers.d.events and transfers.p.events), "the end of a handover that was tampered with"
        )
        assert kinds(transfers.d.events + transfers.p.events) == [Rejected, Rejected]


@guarantee(29, requires="messages")
@examples()
def test_g29_what_is_left_out_on_its_way_is_missed(kit: Kit, draw: Draw) -> None:
    """The wire loses nothing, but the seal does not rely on it."""
    missing = draw(st.sets(st.integers(0, 2), max_size=3), "messages with a block that are left out")
    count = iter(range(10_000))
    with KvHandover(kit) as transfers:
        transfers.leave_out(Blocks, lambda: next(count) in missing)
        transfers.reserve(KEY, PROMISED)
        for number, block in enumerate(SENT):
            transfers.send(KEY, number, [block])
        handover = transfers.seal(KEY, 3)
        transfers.until(
            lambda: bool(transfers.d.events and transfers.p.events), "the end of a handover with messages left out"
        )
        if missing:
            assert kinds(transfers.d.events + transfers.p.events) == [Rejected, Rejected]
        else:
            assert transfers.d.events == [Arrived(KEY, handover)] == transfers.p.events
            transfers.check_moved(SENT, PROMISED)


@guarantee(30, requires=("async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("how", ["cancelled", "withdrawn", "rejected", "newer", "arrived"])
def test_g30_no_end_is_told_while_blocks_are_being_written(kit: Kit, how: str) -> None:
    with KvHandover(kit) as transfers:
        with kit.held(transfers.d.cache.stream, "a transfer's call"):
            transfers.reserve(KEY, PROMISED)
            transfers.send(KEY, 0, SENT)
            transfers.look()
            _end(transfers, how)
            transfers.look()
            events = list(transfers.d.events)
        assert events == [], f"{events} came while the writes of its blocks were held"
        transfers.until(lambda: bool(transfers.d.events), "the end, once the writes had ended")
        assert len(ends(transfers.d.events, KEY)) == 1


def _end(transfers: KvHandover, how: str) -> None:
    if how == "cancelled":
        transfers.d.transfer.cancel(KEY)
    elif how == "withdrawn":
        transfers.p.transfer.cancel(KEY)
    elif how == "newer":
        transfers.reserve(HandoverKey("r", 1), [6, 8])
    else:
        transfers.seal(KEY, 3 if how == "arrived" else 2)


@guarantee(30)
@pytest.mark.parametrize("how", ["cancelled", "newer"])
def test_g30_nothing_is_written_once_the_end_was_told(kit: Kit, how: str) -> None:
    with KvHandover(kit) as transfers:
        transfers.reserve(KEY, PROMISED)
        transfers.send(KEY, 0, SENT[:1])
        transfers.look()
        _end(transfers, how)
        events = transfers.d.events
        transfers.until_one(transfers.d, lambda: bool(events), "the end")  # the prefill side does not know it yet
        assert kinds(ends(transfers.d.events, KEY)) == [Cancelled], f"told was {transfers.d.events}"
        before = transfers.d.cache.held()
        transfers.send(KEY, 1, SENT[1:])
        transfers.seal(KEY, 3)
        transfers.until(lambda: bool(transfers.p.events), "the prefill side's word that it was given up")
        assert np.array_equal(transfers.d.cache.held(), before), "blocks were written after Cancelled"
        assert len(ends(transfers.d.events, KEY)) == 1, f"one handover ended as {transfers.d.events}"


@guarantee(30)
def test_g30_blocks_are_promised_to_one_at_a_time(kit: Kit) -> None:
    with KvHandover(kit) as transfers:
        transfers.reserve(KEY, PROMISED)
        other = HandoverKey("other", 0)
        assert_raises(InvalidValue, lambda: transfers.reserve(other, [0, PROMISED[1]]), "a block that is promised")
        transfers.d.transfer.cancel(KEY)
        transfers.until(lambda: bool(transfers.d.events), "the end of a handover that was cancelled")
        transfers.reserve(other, [0, PROMISED[1]])
        transfers.send(other, 0, SENT[:2])
        transfers.seal(other, 2)
        transfers.until(lambda: len(transfers.d.events) > 1, "the end of the next one")
        assert kinds(transfers.d.events) == [Cancelled, Arrived]
        transfers.check_moved(SENT[:2], [0, PROMISED[1]])


@guarantee(30)
def test_g30_an_older_attempt_is_fenced_off(kit: Kit) -> None:
    newer = HandoverKey("r", 1)
    with KvHandover(kit) as transfers:
        transfers.reserve(newer, PROMISED)
        assert_raises(InvalidValue, lambda: transfers.reserve(KEY, [8]), "an attempt that came late")
        transfers.send(KEY, 0, [9])
        transfers.send(newer, 0, SENT)
        transfers.seal(newer, 3)
        transfers.until(lambda: bool(transfers.d.events), "the end of the newer attempt")
        assert kinds(transfers.d.events) == [Arrived]
        transfers.check_moved(SENT, PROMISED)


@guarantee(31)
@pytest.mark.parametrize("fact", LABELS)
@pytest.mark.parametrize("how", ["differs", "is missing"])
def test_g31_a_fact_that_differs_is_named_before_the_first_byte(kit: Kit, fact: str, how: str) -> None:
    facts = dict(FACTS)
    del facts[fact]
    if how == "differs":
        facts[fact] = "something else"
    with KvHandover(kit, d_facts=facts) as transfers:
        for who, call in (
            ("reserve", lambda: transfers.reserve(KEY, PROMISED)),
            ("send", lambda: transfers.send(KEY, 0, SENT)),
        ):
            error = assert_raises(InvalidValue, call, f"{who} where {fact!r} {how}")
            assert fact in str(error), f"{who}: {error} does not name {fact!r}"
        assert transfers.net.sent == 0, f"{transfers.net.sent} messages were sent although {fact!r} {how}"
        transfers.look()
        transfers.check_untouched(range(BLOCKS), f"{fact!r} {how}")


@guarantee(32)
@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("gone", ["p", "d"])
def test_g32_a_peer_that_vanishes_ends_what_it_had_part_in(kit: Kit, gone: str, sealed: bool) -> None:
    with KvHandover(kit, silence=SHORT) as transfers:
        transfers.reserve(KEY, PROMISED)
        transfers.send(KEY, 0, SENT)
        if gone == "p":
            transfers.look()
        elif sealed:
            transfers.seal(KEY, 3)
        left = transfers.d if gone == "p" else transfers.p
        getattr(transfers, gone).transfer.close()
        other = HandoverKey("other", 0)
        if gone == "p":
            transfers.reserve(other, [8])
        transfers.until_one(
            left, lambda: bool(ends(left.events, KEY)), "the end of a handover whose other side is gone"
        )
        assert kinds(ends(left.events, KEY)) == [PeerLost], f"told was {left.events}"
        if gone == "p":
            transfers.until_one(left, lambda: bool(ends(left.events, other)), "the end of a later reservation")


@guarantee(32)
@examples()
def test_g32_each_handover_ends_once_on_each_side(kit: Kit, draw: Draw) -> None:
    acts = ["send", "seal", "cancel d", "cancel p", "look p", "look d"]
    drawn = draw(st.lists(st.sampled_from(acts), max_size=12), "what happens, in turn")
    with KvHandover(kit, silence=SHORT) as transfers:
        transfers.reserve(KEY, PROMISED)
        transfers.reserve(KEY, PROMISED)  # repeating the call has no effect
        sent, is_sealed = 0, False
        for act in drawn:
            if act == "send" and sent < 3 and not is_sealed and not transfers.p.events:
                transfers.send(KEY, sent, SENT[sent : sent + 1])
                sent += 1
            elif act == "seal" and sent and not transfers.p.events:
                transfers.seal(KEY, 3)
                is_sealed = True
            elif act.startswith("cancel"):
                getattr(transfers, act[-1]).transfer.cancel(KEY)
                getattr(transfers, act[-1]).look()
            elif act.startswith("look"):
                getattr(transfers, act[-1]).look()
        if sent and not is_sealed:  # the handover does not continue
            transfers.p.transfer.cancel(KEY)
        sides = [transfers.d, *([transfers.p] if sent else [])]
        transfers.until(lambda: all(ends(side.events, KEY) for side in sides), "an end on each side")
        transfers.look()
        for side in sides:
            assert len(side.events) == 1, f"one handover ended as {side.events}"
        if kinds(transfers.d.events) == [Arrived]:
            transfers.check_moved(SENT, PROMISED)


MOVES: dict[HandoverKey, tuple[list[int], list[int]]] = {
    HandoverKey("a", 0): ([0, 1, 2], [9, 4, 0]),
    HandoverKey("b", 0): ([3, 4], [7, 2]),
    HandoverKey("c", 3): ([5, 6, 7], [1, 3, 8]),
    HandoverKey("d", 0): ([8, 9], [5, 6]),
}
"""Handover to the blocks that are sent and those that are promised: together all blocks of both caches."""
KEYS = list(MOVES)
ALL_SENT = [block for sent, _ in MOVES.values() for block in sent]
ALL_PROMISED = [block for _, promised in MOVES.values() for block in promised]


def begun(transfers: KvHandover) -> None:
    """Reserve all, and send all blocks but the last of each, one of each in turn."""
    for key, (_, promised) in MOVES.items():
        transfers.reserve(key, promised)
    for turn in range(2):
        for key, (sent, _) in MOVES.items():
            if turn < len(sent) - 1:
                transfers.send(key, turn, sent[turn : turn + 1])
                transfers.look(1)


def ended(transfers: KvHandover, key: HandoverKey) -> Handover:
    """Send the last block of a handover, and seal it."""
    sent, _ = MOVES[key]
    transfers.send(key, len(sent) - 1, sent[-1:])
    return transfers.seal(key, len(sent), b"state of " + key.request_id.encode())


def check_ends(transfers: KvHandover, seals: dict[HandoverKey, Handover]) -> None:
    """Wait until each of these has arrived, once on each side and with its own seal."""
    __tracebackhide__ = True
    sides = {"decode": transfers.d, "prefill": transfers.p}
    transfers.until(lambda: all(ends(side.events, key) for side in sides.values() for key in seals), "the ends of all")
    transfers.look()
    for name, side in sides.items():
        for key, handover in seals.items():
            found = ends(side.events, key)
            assert found == [Arrived(key, handover)], f"{key} has ended as {found} on the {name} side"


@guarantee(29)
@pytest.mark.parametrize("order", [KEYS, KEYS[::-1], [*KEYS[2:], *KEYS[:2]]], ids=["first", "last", "middle"])
def test_g29_several_handovers_at_once_keep_their_blocks_apart(kit: Kit, order: list[HandoverKey]) -> None:
    with KvHandover(kit) as transfers:
        begun(transfers)
        seals = {key: ended(transfers, key) for key in order}
        check_ends(transfers, seals)
        transfers.check_moved(ALL_SENT, ALL_PROMISED)


@guarantee(30, also=(29, 32))
@pytest.mark.parametrize("side", ["d", "p"])
@pytest.mark.parametrize("gone", KEYS, ids=lambda key: key.request_id)
def test_g30_of_several_handovers_one_is_cancelled_alone(kit: Kit, gone: HandoverKey, side: str) -> None:
    with KvHandover(kit) as transfers:
        begun(transfers)
        getattr(transfers, side).transfer.cancel(gone)
        transfers.until(lambda: bool(ends(transfers.d.events, gone)), f"the end of {gone}, cancelled by {side}")
        assert kinds(transfers.d.events) == [Cancelled], (
            f"one of four was cancelled, and the ends are {transfers.d.events}"
        )
        again = HandoverKey(gone.request_id, gone.attempt + 1)
        sent, promised = MOVES[gone]
        transfers.reserve(again, promised)  # its blocks are free again, beside those of the others
        seals = {key: ended(transfers, key) for key in KEYS if key != gone}
        transfers.send(again, 0, sent)
        seals[again] = transfers.seal(again, len(sent), b"again")
        check_ends(transfers, seals)
        transfers.check_moved(ALL_SENT, ALL_PROMISED)
