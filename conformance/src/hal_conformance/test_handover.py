"""Keys and values between workers: before the first byte, at the seal, after a cancel, after a lost peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.handover.facts import FACTS as LABELS
from hal_core.handover.messages import Blocks, Seal
from hal_core.handover.protocol import Arrived, Cancelled, HandoverKey, PeerLost, Rejected
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
    with KvHandover(kit) as handing:
        handing.reserve(KEY, promised)
        for first, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            handing.send(KEY, first, sent[first:end])
            handing.look(1)
        handover = handing.seal(KEY, len(sent))
        handing.until(lambda: bool(handing.d.told), "the end of a handover that was sealed")
        assert handing.d.told == [Arrived(KEY, handover)], f"the decode side got {handing.d.told}"
        handing.check_moved(sent, promised)
        handing.until(lambda: bool(handing.p.told), "the prefill side's word that all has arrived")
        assert handing.p.told == [Arrived(KEY, handover)], f"the prefill side got {handing.p.told}"


@guarantee(29)
def test_g29_nothing_has_arrived_before_its_seal(kit: Kit) -> None:
    with KvHandover(kit) as handing:
        handing.reserve(KEY, PROMISED)
        handing.send(KEY, 0, SENT)
        handing.look(50)
        assert handing.d.told == [], f"all blocks came without a seal, but the events are {handing.d.told}"
        handing.seal(KEY, 3)
        handing.until(lambda: bool(handing.d.told), "the end of a handover that was sealed")
        assert kinds(handing.d.told) == [Arrived]


@guarantee(29)
@pytest.mark.parametrize("says", [1, 3, 4])
def test_g29_a_seal_of_another_count_is_no_arrival(kit: Kit, says: int) -> None:
    with KvHandover(kit) as handing:
        handing.reserve(KEY, [*PROMISED, 0])
        handing.send(KEY, 0, SENT[:2])
        try:
            handing.seal(KEY, says)
        except InvalidValue:
            return  # the sender's own side has noticed it
        handing.until(lambda: bool(handing.d.told and handing.p.told), "the end of a handover with a wrong seal")
        told = f"2 blocks came, the seal states {says}, but the events are"
        assert kinds(handing.d.told) == [Rejected], f"{told} {handing.d.told}"
        assert kinds(handing.p.told) == [Rejected], f"{told} {handing.p.told} on the prefill side"


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
    with KvHandover(kit) as handing:
        handing.change(kind, change)
        handing.reserve(KEY, PROMISED)
        handing.send(KEY, 0, SENT)
        handing.seal(KEY, 3)
        handing.until(lambda: bool(handing.d.told and handing.p.told), "the end of a handover that was tampered with")
        assert kinds(handing.d.told + handing.p.told) == [Rejected, Rejected]


@guarantee(29, requires="messages")
@examples()
def test_g29_what_is_lost_on_its_way_is_missed(kit: Kit, draw: Draw) -> None:
    lost = draw(st.sets(st.integers(0, 15), max_size=4), "messages that are lost")
    count = iter(range(10_000))
    with KvHandover(kit) as handing:
        handing.net.deliver = lambda _from, _to, message: () if next(count) in lost else (message,)
        handing.reserve(KEY, PROMISED)
        handing.send(KEY, 0, SENT[:2])
        handing.send(KEY, 2, SENT[2:])
        handover = handing.seal(KEY, 3)
        handing.until(lambda: bool(handing.d.told and handing.p.told), "the end of a handover with losses on the way")
        assert handing.d.told == [Arrived(KEY, handover)] == handing.p.told
        handing.check_moved(SENT, PROMISED)


@guarantee(30, requires=("async_h2d", "can_hold_stream"))
@pytest.mark.parametrize("how", ["cancelled", "withdrawn", "rejected", "newer", "arrived"])
def test_g30_no_end_is_told_while_blocks_are_being_written(kit: Kit, how: str) -> None:
    with KvHandover(kit) as handing:
        with kit.held(handing.d.cache.stream, "a transfer's call"):
            handing.reserve(KEY, PROMISED)
            handing.send(KEY, 0, SENT)
            handing.look()
            _end(handing, how)
            handing.look()
            told = list(handing.d.told)
        assert told == [], f"{told} came while the writes of its blocks were held"
        handing.until(lambda: bool(handing.d.told), "the end, once the writes had ended")
        assert len(ends(handing.d.told, KEY)) == 1


def _end(handing: KvHandover, how: str) -> None:
    if how == "cancelled":
        handing.d.transfer.cancel(KEY)
    elif how == "withdrawn":
        handing.p.transfer.cancel(KEY)
    elif how == "newer":
        handing.reserve(HandoverKey("r", 1), [6, 8])
    else:
        handing.seal(KEY, 3 if how == "arrived" else 2)


@guarantee(30)
@pytest.mark.parametrize("how", ["cancelled", "newer"])
def test_g30_nothing_is_written_once_the_end_was_told(kit: Kit, how: str) -> None:
    with KvHandover(kit) as handing:
        handing.reserve(KEY, PROMISED)
        handing.send(KEY, 0, SENT[:1])
        handing.look()
        _end(handing, how)
        told = handing.d.told
        handing.until_one(handing.d, lambda: bool(told), "the end")  # the prefill side does not know it yet
        assert kinds(ends(handing.d.told, KEY)) == [Cancelled], f"told was {handing.d.told}"
        before = handing.d.cache.held()
        handing.send(KEY, 1, SENT[1:])
        handing.seal(KEY, 3)
        handing.until(lambda: bool(handing.p.told), "the prefill side's word that it was given up")
        assert np.array_equal(handing.d.cache.held(), before), "blocks were written after Cancelled"
        assert len(ends(handing.d.told, KEY)) == 1, f"one handover ended as {handing.d.told}"


@guarantee(30)
def test_g30_blocks_are_promised_to_one_at_a_time(kit: Kit) -> None:
    with KvHandover(kit) as handing:
        handing.reserve(KEY, PROMISED)
        other = HandoverKey("other", 0)
        assert_raises(InvalidValue, lambda: handing.reserve(other, [0, PROMISED[1]]), "a block that is promised")
        handing.d.transfer.cancel(KEY)
        handing.until(lambda: bool(handing.d.told), "the end of a handover that was cancelled")
        handing.reserve(other, [0, PROMISED[1]])
        handing.send(other, 0, SENT[:2])
        handing.seal(other, 2)
        handing.until(lambda: len(handing.d.told) > 1, "the end of the next one")
        assert kinds(handing.d.told) == [Cancelled, Arrived]
        handing.check_moved(SENT[:2], [0, PROMISED[1]])


@guarantee(30)
def test_g30_an_older_attempt_is_fenced_off(kit: Kit) -> None:
    newer = HandoverKey("r", 1)
    with KvHandover(kit) as handing:
        handing.reserve(newer, PROMISED)
        assert_raises(InvalidValue, lambda: handing.reserve(KEY, [8]), "an attempt that came late")
        handing.send(KEY, 0, [9])
        handing.send(newer, 0, SENT)
        handing.seal(newer, 3)
        handing.until(lambda: bool(handing.d.told), "the end of the newer attempt")
        assert kinds(handing.d.told) == [Arrived]
        handing.check_moved(SENT, PROMISED)


@guarantee(31)
@pytest.mark.parametrize("fact", LABELS)
@pytest.mark.parametrize("how", ["differs", "is missing"])
def test_g31_a_fact_that_differs_is_named_before_the_first_byte(kit: Kit, fact: str, how: str) -> None:
    facts = dict(FACTS)
    del facts[fact]
    if how == "differs":
        facts[fact] = "something else"
    with KvHandover(kit, d_facts=facts) as handing:
        for who, call in (
            ("reserve", lambda: handing.reserve(KEY, PROMISED)),
            ("send", lambda: handing.send(KEY, 0, SENT)),
        ):
            error = assert_raises(InvalidValue, call, f"{who} where {fact!r} {how}")
            assert fact in str(error), f"{who}: {error} does not name {fact!r}"
        assert handing.net.sent == 0, f"{handing.net.sent} messages were sent although {fact!r} {how}"
        handing.look()
        handing.check_untouched(range(BLOCKS), f"{fact!r} {how}")


@guarantee(32)
@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize("gone", ["p", "d"])
def test_g32_a_peer_that_vanishes_ends_what_it_had_part_in(kit: Kit, gone: str, sealed: bool) -> None:
    with KvHandover(kit, silence=SHORT) as handing:
        handing.reserve(KEY, PROMISED)
        handing.send(KEY, 0, SENT)
        if gone == "p":
            handing.look()
        elif sealed:
            handing.seal(KEY, 3)
        left = handing.d if gone == "p" else handing.p
        getattr(handing, gone).transfer.close()
        other = HandoverKey("other", 0)
        if gone == "p":
            handing.reserve(other, [8])
        handing.until_one(left, lambda: bool(ends(left.told, KEY)), "the end of a handover whose other side is gone")
        assert kinds(ends(left.told, KEY)) == [PeerLost], f"told was {left.told}"
        if gone == "p":
            handing.until_one(left, lambda: bool(ends(left.told, other)), "the end of a later reservation")


@guarantee(32)
@examples()
def test_g32_each_handover_ends_once_on_each_side(kit: Kit, draw: Draw) -> None:
    acts = ["send", "seal", "cancel d", "cancel p", "look p", "look d"]
    drawn = draw(st.lists(st.sampled_from(acts), max_size=12), "what happens, in turn")
    with KvHandover(kit, silence=SHORT) as handing:
        handing.reserve(KEY, PROMISED)
        handing.reserve(KEY, PROMISED)  # repeating the call has no effect
        sent, is_sealed = 0, False
        for act in drawn:
            if act == "send" and sent < 3 and not is_sealed and not handing.p.told:
                handing.send(KEY, sent, SENT[sent : sent + 1])
                sent += 1
            elif act == "seal" and sent and not handing.p.told:
                handing.seal(KEY, 3)
                is_sealed = True
            elif act.startswith("cancel"):
                getattr(handing, act[-1]).transfer.cancel(KEY)
                getattr(handing, act[-1]).look()
            elif act.startswith("look"):
                getattr(handing, act[-1]).look()
        if sent and not is_sealed:  # the handover does not continue
            handing.p.transfer.cancel(KEY)
        sides = [handing.d, *([handing.p] if sent else [])]
        handing.until(lambda: all(ends(side.told, KEY) for side in sides), "an end on each side")
        handing.look()
        for side in sides:
            assert len(side.told) == 1, f"one handover ended as {side.told}"
        if kinds(handing.d.told) == [Arrived]:
            handing.check_moved(SENT, PROMISED)
