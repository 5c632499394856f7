"""Large frames, which have no checksum over their arrays, and messages that this version's reader cannot use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.frames.envelope import FrameKind, encode, read_header, seal
from hal_engine.reading import FrameSkipped, Gap, SessionStarted
from hal_engine.transport.protocol import Cursor, read_control

from .conftest import Large, Output
from .test_bad_peers import SESSION, ByHand

FORMER_KINDS = range(7, 12)  # : announced frames in shared memory and in pieces


@pytest.fixture
def by_hand(opened):
    """A reader that has given its cursor, its events, and a sender by hand."""
    events = []
    reader = opened.reader(on_event=events.append)
    sender = ByHand(reader.url)
    sender.say(sender.state(0))
    assert sender.answer_cursor(reader, last=0) == 0
    yield reader, events, sender
    sender.context.destroy(linger=0)


def frame(step):
    return encode(Large(step).resolve(), session=SESSION, sender=0, sequence=step)


def test_arrays_of_a_large_frame_are_read_only_views_of_its_message(by_hand):
    reader, events, sender = by_hand
    for step in (1, 2):
        sender.say(frame(step))
        found = reader.read(10)
        assert found.record == Large(step).resolve()
        assert (found.header.kind, found.header.sequence) == (FrameKind.OUTPUT, step)
        for array in (found.record.logprobs, found.record.logprob_token_ids):
            assert not array.flags.owndata
            assert not array.flags.writeable
    assert reader.counters() == {"frames": 2, "duplicates": 0, "skipped": 0}
    assert [type(event) for event in events] == [SessionStarted]


def test_g19_lost_large_frames_are_requested_and_duplicates_dropped(by_hand, steps):
    reader, events, sender = by_hand
    sender.say(frame(2))
    assert sender.answer_cursor(reader, last=0) == 0
    for step in (1, 1, 2):
        sender.say(frame(step))
    assert steps(reader, 2) == [1, 2]
    assert reader.counters()["duplicates"] == 1
    assert not [event for event in events if isinstance(event, Gap | FrameSkipped)]


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
    sender.say(unsound(1))
    assert sender.answer_cursor(reader, last=0) == 0
    sender.say(frame(1))
    assert steps(reader, 1) == [1]
    assert reader.counters()["skipped"] == 1
    sender.say(unsound(2))
    assert sender.answer_cursor(reader, last=1) == 1
    sender.say(unsound(2))
    sender.say(frame(3))
    assert steps(reader, 1) == [3]
    (gap,) = [event for event in events if isinstance(event, Gap)]
    assert (gap.first, gap.last) == (2, 2)


def test_a_message_in_several_parts_is_skipped_and_told(by_hand, steps):
    reader, events, sender = by_hand
    for message in ((b"garbage", b"more"), (frame(1), b"more"), (frame(1), frame(2), b"", b"and more")):
        sender.socket.send_multipart(message)
    sender.say(frame(1))
    assert steps(reader, 1) == [1]
    assert [type(event) for event in events] == [SessionStarted, *[FrameSkipped] * 3]
    assert all("several parts" in event.reason for event in events[1:])


def test_a_reader_skips_messages_of_former_versions(opened):
    """Such a sender sends them only to a reader that has requested them, and they are not an error."""
    events = []
    reader = opened.reader(on_event=events.append)
    sender = ByHand(reader.url)
    sender.say(sender.state(0))
    message = sender.hear(reader)
    assert set(msgspec.msgpack.decode(message[64:])) <= {"token", "explicit", "leaving"}
    token = read_control(read_header(message), message, Cursor).token
    sender.say(sender.state(0, echo=token))
    for kind in FORMER_KINDS:
        sender.say(seal(kind, b"", session=SESSION, sender=0, sequence=1))
    sender.say(frame(1))
    assert reader.read(10).record.step == 1
    assert reader.counters() == {"frames": 1, "duplicates": 0, "skipped": 0}
    assert [type(event) for event in events] == [SessionStarted]
    sender.context.destroy(linger=0)


def test_a_sink_serves_a_reader_of_a_former_version_with_whole_frames(opened, url, monkeypatch):
    """Its cursor lists pieces, and the place of its shared memory."""

    class Former(Cursor):
        pieces: bool = True
        shared: str = "0123456789abcdef"

    monkeypatch.setattr("hal_engine.reading.session.Cursor", Former)
    reader, sink = opened.reader(), opened.sink()
    for output in (Large(1), Output(2), Large(3)):
        sink.put(output)
        found = reader.read(10)
        assert found.record == output.resolve()
        assert found.header.kind == FrameKind.OUTPUT
    assert reader.counters() == {"frames": 3, "duplicates": 0, "skipped": 0}


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


def test_g19_a_reader_that_comes_after_another_gets_large_frames_again(opened, steps):
    first, sink = opened.reader(auto_ack=False), opened.sink()
    for step in (1, 2):
        sink.put(Large(step))
        assert first.read(10).record.step == step
    first.close()
    second = opened.reader()
    assert [second.read(10).record == Large(step).resolve() for step in (1, 2)] == [True] * 2
    assert sink.counters()["resent"] == 2
    sink.put(Large(3))
    assert steps(second, 1) == [3]


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
    """A reader that does not read: ZeroMQ takes some messages, and the rest waits."""
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
