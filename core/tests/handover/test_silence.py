"""Handovers whose peer is silent or gone: each ends, and no live peer is reported as lost (G32)."""

import numpy as np
import pytest
from hal_core.handover import Arrived, PeerLost, Rejected

from core.tests.handover.pairs import BLOCK_BYTES, FACTS, LateCache, Pair, Side, hand_over, key


@pytest.fixture
def pair():
    return Pair()


def test_a_sender_that_nothing_was_promised_to_is_rejected(pair):
    pair.send(key(), 0, [0])
    pair.look()
    assert pair.p.events == [Rejected(key(), "no blocks are reserved for it")]
    pair.reserve(key(1), [1])
    other = Side(pair.net, "other", pair.clock, fill=3)
    other.transfer.send(key(1), pair.d.description, 0, [0])
    pair.look()
    other.look()
    assert other.events == [Rejected(key(1), "its blocks are reserved for another sender")]
    assert pair.d.events == []


@pytest.mark.parametrize("gone", ["p", "d"])
def test_a_peer_that_vanishes_ends_what_it_had_part_in(pair, gone):
    for number in range(2):
        pair.reserve(key(number), [1 + number])
        pair.send(key(number), 0, [0])
    pair.look()
    getattr(pair, gone).transfer.close()
    left = pair.d if gone == "p" else pair.p
    assert left.look() == [PeerLost(f"memory://{gone}", (key(0), key(1)))]


def test_a_source_that_does_not_come_is_lost(pair):
    pair.reserve(key(), [1])
    pair.wait(9)
    assert pair.d.events == []
    pair.wait(2)
    assert pair.d.events == [PeerLost("memory://p", (key(),))]


def test_a_peer_that_lives_is_not_lost_however_long_its_prompt_takes(pair):
    pair.reserve(key(), [1])
    pair.send(key(), 0, [])
    pair.wait(50)
    pair.send(key(), 0, [0])
    handover = pair.seal(key(), 1)
    pair.look()
    assert pair.d.events == [Arrived(key(), handover)] == pair.p.events


def test_a_side_that_was_stopped_itself_takes_no_other_for_lost(pair):
    pair.reserve(key(), [1])
    pair.clock.now += 1000
    pair.d.look()
    pair.send(key(), 0, [0])
    handover = pair.seal(key(), 1)
    pair.look()
    assert pair.d.events == [Arrived(key(), handover)] == pair.p.events


def test_a_promise_that_nobody_seals_ends_although_its_source_lives(pair):
    pair.reserve(key(), [1])
    pair.send(key(), 0, [0])
    pair.wait(62)
    assert pair.d.events == [Rejected(key(), "not sealed within 60 s")]
    assert pair.p.events == [Rejected(key(), "not sealed within 60 s")]


def test_a_seal_that_is_never_answered_ends(pair):
    cache = LateCache(np.zeros((8, BLOCK_BYTES), np.uint8), FACTS)
    pair = Pair(d_cache=cache)
    hand_over(pair)
    pair.wait(62)
    assert pair.p.events == [Rejected(key(), "not answered within 60 s")]


def test_a_receiver_that_was_started_again_is_lost(pair):
    hand_over(pair)
    pair.d.transfer.close()
    pair.p.look()
    assert pair.p.events == [PeerLost("memory://d", (key(0),))]
    pair.p.transfer.send(key(1), pair.d.description, 0, [0])
    pair.p.look()
    assert pair.p.events[1:] == [PeerLost("memory://d", (key(1),))]
