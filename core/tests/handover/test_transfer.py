"""A handover over an in-memory wire: its normal course, and every other way in which it ends."""

from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import HalError, InvalidValue
from hal_core.handover import Arrived, PeerLost, Rejected
from hal_core.handover.device_blocks import AllOf, DeviceBlocks
from hal_core.handover.messages import Blocks, Seal, pack, unpack
from hal_core.tickets import PromiseTicket

from core.tests.handover.pairs import BLOCK_BYTES, BLOCKS, FACTS, Clock, LateCache, Pair, hand_over, key


@pytest.fixture
def pair():
    return Pair()


def edited(net, kind, edit):
    """Change messages of that kind in flight: ``edit(message, data)`` returns message and data."""

    def deliver(_from, _to, buffer):
        message, data = unpack(buffer)
        if not isinstance(message, kind):
            return (buffer,)
        message, data = edit(message, bytearray(data))
        return (b"".join(pack(message, bytes(data))),)

    net.deliver = deliver


def moved(pair, sent, promised):
    return np.array_equal(pair.p.cache.data[sent], pair.d.cache.data[promised])


def flipped(message, data):
    data[-1] ^= 1
    return message, data


def other_first_token(message, data):
    message.first_token += 1
    return message, data


def other_facts(message, data):
    message.facts_digest = b"12345678"
    return message, data


def shorter(message, data):
    return message, data[:-1]


def further(message, data):
    message.first += 2
    return message, data


@pytest.mark.parametrize(
    ("kind", "edit", "why"),
    [
        (Blocks, flipped, "checksum"),
        (Blocks, other_facts, "fingerprint"),
        (Blocks, shorter, "bytes came for"),
        (Blocks, further, "are reserved"),
        (Seal, other_first_token, "digest"),
    ],
)
def test_what_was_changed_on_the_way_is_rejected_and_never_used(pair, kind, edit, why):
    edited(pair.net, kind, edit)
    before = pair.d.cache.data.copy()
    hand_over(pair)
    pair.look()
    for side in (pair.d, pair.p):
        assert [type(event) for event in side.events] == [Rejected]
        assert why in side.events[0].why
    if kind is Blocks:
        assert np.array_equal(pair.d.cache.data, before)


def test_the_first_difference_in_order_is_named():
    pair = Pair(d_facts=FACTS | {"tp shard": "1/2", "contract": "2.0"})
    with pytest.raises(InvalidValue, match=r"contract: '2\.0' here, '1\.0' there"):
        pair.reserve(key(), [1])


@pytest.mark.parametrize("missing", range(2))
def test_a_message_that_is_left_out_is_missed_at_the_seal(pair, missing):
    """The wire loses none, but the seal does not rely on it."""
    count = iter(range(1000))
    pair.net.deliver = lambda _from, _to, message: () if next(count) == missing else (message,)
    hand_over(pair)
    pair.look()
    assert [type(event) for event in pair.d.events + pair.p.events] == [Rejected, Rejected]
    assert "has not come" in pair.p.events[0].why


def test_a_connection_that_breaks_loses_the_peer_and_the_next_attempt_arrives(pair):
    pair.reserve(key(), [1, 3, 4])
    pair.send(key(), 0, [5, 2])
    pair.net.cut()
    pair.send(key(), 2, [7])
    pair.seal(key(), 3)
    pair.look()
    assert pair.d.events == [PeerLost("memory://p", (key(),))]
    assert pair.p.events == [PeerLost("memory://d", (key(),))]
    handover = hand_over(pair, key(0, 1))
    pair.look()
    assert pair.d.events[1:] == [Arrived(key(0, 1), handover)] == pair.p.events[1:]
    assert moved(pair, [5, 2, 7], [1, 3, 4])


@pytest.mark.parametrize("how", ["cancelled", "withdrawn", "rejected", "lost", "arrived", "newer"])
def test_no_block_has_ended_while_it_may_be_written(how):
    cache = LateCache(np.zeros((8, BLOCK_BYTES), np.uint8), FACTS)
    pair = Pair(d_cache=cache)
    pair.reserve(key(), [1, 3])
    pair.send(key(), 0, [0, 1])
    pair.look()
    if how == "cancelled":
        pair.d.transfer.cancel(key())
    elif how == "withdrawn":
        pair.p.transfer.cancel(key())
    elif how == "rejected":
        pair.seal(key(), 1)
    elif how == "lost":
        pair.p.transfer.close()
        pair.d.look()
    elif how == "arrived":
        pair.seal(key(), 2)
    else:
        pair.reserve(key(0, 1), [4, 5])
    pair.look()
    assert pair.d.events == []
    with pytest.raises(InvalidValue, match="block 3 is reserved"):
        pair.reserve(key(1), [3])
    for ticket in cache.tickets:
        ticket.complete()
    pair.look()
    assert len(pair.d.events) == 1
    pair.reserve(key(1), [3])


def hand_over_in_vain(pair, tickets, error):
    hand_over(pair)
    pair.look()
    for ticket in tickets:
        ticket.complete(error)
    pair.look()


def test_a_write_that_fails_is_no_arrival():
    cache = LateCache(np.zeros((8, BLOCK_BYTES), np.uint8), FACTS)
    pair = Pair(d_cache=cache)
    hand_over_in_vain(pair, cache.tickets, InvalidValue("the device is broken"))
    assert [type(event) for event in pair.d.events + pair.p.events] == [Rejected, Rejected]
    assert "the device is broken" in pair.p.events[0].why


def test_the_same_call_again_changes_nothing(pair):
    handover = hand_over(pair)
    pair.reserve(key(), [1, 3, 4])
    pair.p.transfer.seal(key(), pair.d.description, handover)
    pair.look()
    assert pair.d.events == [Arrived(key(), handover)] == pair.p.events


def test_what_cannot_be_is_refused(pair):
    pair.reserve(key(), [1, 3])
    for blocks in ([], [8], [-1], [2, 2]):
        with pytest.raises(InvalidValue, match="cannot be reserved"):
            pair.reserve(key(1), blocks)
    with pytest.raises(InvalidValue, match="has other blocks reserved"):
        pair.reserve(key(), [1, 4])
    with pytest.raises(InvalidValue, match="block 3 is reserved"):
        pair.reserve(key(1), [3, 4])
    with pytest.raises(InvalidValue, match="no blocks were sent"):
        pair.seal(key(), 1)
    with pytest.raises(InvalidValue, match="not blocks of the cache"):
        pair.send(key(), 0, [8])
    pair.send(key(), 0, [0])
    pair.seal(key(), 1)
    with pytest.raises(InvalidValue, match="sealed"):
        pair.send(key(), 1, [1])
    pair.look()
    with pytest.raises(InvalidValue, match="has ended"):
        pair.send(key(), 0, [1])


def test_a_wire_without_room_keeps_the_caller_from_nothing(pair):
    pair.p.wire.room = False
    handover = hand_over(pair)
    pair.look()
    assert (pair.d.events, pair.net.sent) == ([], 0)
    pair.p.wire.room = True
    pair.look()
    assert pair.d.events == [Arrived(key(), handover)] == pair.p.events


def test_many_blocks_are_sent_in_several_messages(pair, monkeypatch):
    monkeypatch.setattr("hal_core.handover.offers.MESSAGE_BYTES", BLOCK_BYTES)
    pair.reserve(key(), range(8))
    pair.send(key(), 0, range(8))
    handover = pair.seal(key(), 8)
    assert pair.net.sent == 9
    pair.look()
    assert pair.d.events == [Arrived(key(), handover)] == pair.p.events
    assert moved(pair, list(range(8)), list(range(8)))


def test_bytes_that_are_no_message_are_skipped(pair):
    for junk in (b"", b"junk", b"HALf" + bytes(60), b"".join(pack(Seal("", 0, 0, 0, 0, [], b"", b"")))[:-1]):
        pair.d.wire.inbox.append((pair.p.wire.session, junk))
        pair.p.wire.inbox.append((pair.d.wire.session, junk))
    handover = hand_over(pair)
    pair.look()
    assert pair.d.events == [Arrived(key(), handover)] == pair.p.events


class LateDevice:
    """A device whose writes end when the test lets them."""

    deadline, default_stream = None, None

    def __init__(self):
        self.tickets = []

    def async_set_value(self, *, target, value, stream):
        self.tickets.append(PromiseTicket("async"))
        return self.tickets[-1]


def test_an_error_of_a_write_ends_the_handover_and_is_not_raised_again_by_the_device():
    device = LateDevice()
    cache = DeviceBlocks(device, SimpleNamespace(nbytes=BLOCKS * BLOCK_BYTES), BLOCKS, BLOCK_BYTES, FACTS)
    pair = Pair(d_cache=cache)
    hand_over_in_vain(pair, device.tickets, HalError("page fault"))
    assert pair.d.events == [Rejected(key(), "the blocks could not be written: page fault")]
    assert all(ticket.observed for ticket in device.tickets)


def test_the_ticket_of_several_writes_waits_for_all_of_them_together(monkeypatch):
    class Slow(PromiseTicket):
        def _block(self, timeout):
            limits.append(timeout)
            clock.now += 3.0
            self.complete()
            return True

    limits, clock = [], Clock()
    monkeypatch.setattr("hal_core.handover.device_blocks.monotonic", clock)
    AllOf([Slow("async") for _ in range(3)]).wait(5.0)
    assert limits == [5.0, 2.0, 0.0]
