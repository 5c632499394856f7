"""Large frames, which have no checksum over their arrays, and messages that this version's reader cannot use."""

import msgspec
import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.frames.envelope import FrameKind, encode, seal
from hal_engine.reading import Gap, SessionStarted
from hal_engine.transport.protocol import OUTPUT

from .conftest import Large
from .test_bad_peers import SESSION, ByHand


@pytest.fixture
def by_hand(opened):
    """A reader that has given its cursor, its events, and a sender by hand."""
    events = []
    reader = opened.reader(on_event=events.append)
    sender = ByHand(reader.url)
    assert sender.connect(reader) == 0
    yield reader, events, sender
    for channel in sender.channels:
        channel.close()


def frame(step):
    return encode(Large(step).resolve(), session=SESSION, sender=0, sequence=step)


def test_arrays_of_a_large_frame_are_read_only_views_of_its_message(by_hand):
    reader, events, sender = by_hand
    for step in (1, 2):
        sender.send(frame(step))
        found = reader.read(10)
        assert found.record == Large(step).resolve()
        assert (found.header.kind, found.header.sequence) == (FrameKind.OUTPUT, step)
        for array in (found.record.logprobs, found.record.logprob_token_ids):
            assert not array.flags.owndata
            assert not array.flags.writeable
    assert reader.counters() == {"frames": 2, "duplicates": 0, "skipped": 0}
    assert [type(event) for event in events] == [SessionStarted]


def test_a_frame_that_comes_with_the_end_of_its_connection_is_read(by_hand):
    """Its last read fills its memory exactly, so the next one in the same turn finds the end."""
    reader, _, sender = by_hand
    large = Large(1)
    large.columns >>= 1  # the kernel takes all of it
    sender.channel.send(OUTPUT, encode(large.resolve(), session=SESSION, sender=0, sequence=1))
    assert not sender.channel.pending
    sender.channel.close()
    found = reader.read(10)
    assert found is not None
    assert found.record == large.resolve()


def torn(step):
    """The frame with another end, of the same length."""
    return frame(step)[:-8] + b"\xff" * 8


def of_another(step):
    """A frame whose alternatives are not the tokens'."""
    body = msgspec.msgpack.decode(frame(step)[64:-16])
    body["lids"] = msgspec.msgpack.decode(frame(step + 1)[64:-16])["lids"]
    return seal(FrameKind.OUTPUT, msgspec.msgpack.encode(body), session=SESSION, sender=0, sequence=step)


@pytest.mark.parametrize("unsound", [torn, of_another])
def test_g19_an_invalid_large_frame_is_requested_once_then_a_gap(by_hand, steps, unsound):
    reader, events, sender = by_hand
    sender.send(unsound(1))
    assert sender.is_cut_off(reader)
    assert sender.connect(reader) == 0
    sender.send(frame(1))
    assert steps(reader, 1) == [1]
    assert reader.counters()["skipped"] == 1
    sender.send(unsound(2))
    assert sender.is_cut_off(reader)
    assert sender.connect(reader) == 1
    sender.send(unsound(2), frame(3))
    assert steps(reader, 1) == [3]
    (gap,) = [event for event in events if isinstance(event, Gap)]
    assert (gap.first, gap.last) == (2, 2)


class Wide(Large):
    """Ids of 64 bits."""

    def resolve(self):
        record = super().resolve()
        object.__setattr__(record, "logprob_token_ids", record.logprob_token_ids.astype(np.int64))
        return record


class Wider(Wide):
    """Ids that need them."""

    def resolve(self):
        record = super().resolve()
        record.logprob_token_ids[1, 1] = 1 << 40
        return record


def test_wide_ids_are_sent_narrow_where_they_fit(opened):
    reader, sink = opened.reader(), opened.sink()
    for output, dtype in ((Wide(1), np.int32), (Wider(2), np.int64)):
        sink.put(output)
        found = reader.read(10).record
        assert found == output.resolve()
        assert found.logprob_token_ids.dtype == dtype


def test_a_record_that_cannot_be_encoded_fails_alone(opened, steps):
    reader, sink = opened.reader(), opened.sink()
    sink.put(Large(1))
    assert steps(reader, 1) == [1]
    bad = Large(2, requests=("\ud800", "b"))
    sink.put(bad)
    assert bad.done.wait(10)
    assert isinstance(bad.settled[0], InvalidValue)
    sink.put(Large(3))
    assert reader.read(10).record == Large(3).resolve()
    assert reader.counters() == {"frames": 2, "duplicates": 0, "skipped": 0}


def test_g18_large_frames_wait_for_room_and_none_is_lost(opened):
    """A reader that does not read: the kernel takes some frames, and the rest waits."""
    reader, sink = opened.reader(auto_ack=False), opened.sink(capacity=200)
    sink.put(Large(0))
    assert reader.read(10).record.step == 0
    outputs = [Large(step) for step in range(1, 151)]
    for output in outputs:
        sink.put(output)
    assert outputs[-1].done.wait(20)
    for output in outputs:
        assert reader.read(10).record.step == output.step
    reader.acknowledge()
    sink.close(10)
    assert sink.counters()["resent"] == 0
