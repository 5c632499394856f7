"""Large frames in pieces over a socket: a reader among lost, torn and repeated ones, and sinks and readers together."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.frames.envelope import FrameKind, encode, read_header, seal_apart
from hal_core.frames.pieces import Writing

from hal.reading import FrameSkipped, Gap, SessionStarted
from hal.reading.session import Session
from hal.transport import private_ipc_url, release_ipc
from hal.transport.protocol import Cursor, read_control

from .conftest import Large, Output
from .test_bad_peers import SESSION, ByHand


@pytest.fixture
def url():
    url = private_ipc_url()
    yield url
    release_ipc(url)


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


def numbers(step):
    return {"session": SESSION, "sender": 0, "sequence": step}


def pieces(step):
    """The messages of the frame of that step, in their parts."""
    writing = Writing(Large(step).resolve(), **numbers(step))
    return [writing.token_ids(), (writing.rows(),), writing.logprobs()]


def say(sender, *messages):
    for message in messages:
        sender.socket.send_multipart(message)


def whole(step):
    return (encode(Large(step).resolve(), **numbers(step)),)


def test_pieces_are_a_frame_and_their_arrays_are_views_of_the_messages(by_hand):
    reader, events, sender = by_hand
    for step in (1, 2):
        say(sender, (seal_apart(FrameKind.COMING, 0, **numbers(0)),), *pieces(step))
        frame = reader.read(10)
        assert frame.record == Large(step).resolve()
        assert (frame.header.kind, frame.header.sequence) == (FrameKind.OUTPUT, step)
        assert not frame.record.logprobs.flags.writeable
    assert reader.counters() == {"frames": 2, "duplicates": 0, "skipped": 0}
    assert [type(event) for event in events] == [SessionStarted]


@pytest.mark.parametrize("lost", range(3))
def test_g19_a_frame_of_which_a_piece_was_lost_is_a_hole_and_comes_whole(by_hand, steps, lost):
    reader, events, sender = by_hand
    say(sender, *[message for at, message in enumerate(pieces(1)) if at != lost], *pieces(2))
    assert sender.answer_cursor(reader, last=0) == 0
    say(sender, whole(1), *pieces(2))
    assert steps(reader, 2) == [1, 2]
    assert not [event for event in events if isinstance(event, Gap | FrameSkipped)]


def test_g19_a_piece_lost_at_the_end_is_noticed_by_the_next_words(by_hand, steps):
    reader, _, sender = by_hand
    say(sender, *pieces(1)[:2])
    for _ in range(2):
        sender.say(sender.state(1))
    assert sender.answer_cursor(reader, last=1) == 0
    say(sender, whole(1))
    assert steps(reader, 1) == [1]


def torn(message):
    """The same with other bytes, of the same length."""
    return (*message[:-1], bytes(message[-1])[:-8] + b"\xff" * 8)


def of_another(step):
    """Ids that are not the tokens'."""
    ids = Writing(Large(step + 1).resolve(), **numbers(step)).token_ids()
    return [ids, *pieces(step)[1:]]


def unsound(step):
    ids, rows, logprobs = pieces(step)
    return {
        "torn rows": [ids, torn(rows), logprobs],
        "short ids": [(ids[0], bytes(ids[1])[4:]), rows, logprobs],
        "short log-probabilities": [ids, rows, (logprobs[0], bytes(logprobs[1])[4:])],
        "another's ids": of_another(step),
    }


@pytest.mark.parametrize("kind", ["torn rows", "short ids", "short log-probabilities", "another's ids"])
def test_an_unsound_piece_is_told_once_and_the_frame_comes_whole(by_hand, steps, kind):
    reader, events, sender = by_hand
    say(sender, *unsound(1)[kind], *pieces(2))
    assert sender.answer_cursor(reader, last=0) == 0
    assert len([event for event in events if isinstance(event, FrameSkipped)]) == 1
    say(sender, whole(1), *pieces(2))
    assert steps(reader, 2) == [1, 2]
    assert reader.counters()["skipped"] == 1
    assert not [event for event in events if isinstance(event, Gap)]


def test_a_frame_that_is_unsound_in_pieces_and_whole_is_a_gap_and_the_stream_goes_on(by_hand, steps):
    reader, events, sender = by_hand
    say(sender, *of_another(1))
    assert sender.answer_cursor(reader, last=0) == 0
    say(sender, torn(whole(1)), *pieces(2))
    assert steps(reader, 1) == [2]
    (gap,) = [event for event in events if isinstance(event, Gap)]
    assert (gap.first, gap.last) == (1, 1)


def test_g19_pieces_that_come_again_are_one_duplicate_a_frame(by_hand, steps):
    reader, _, sender = by_hand
    say(sender, *pieces(1), *pieces(1), whole(1), *pieces(2))
    assert steps(reader, 2) == [1, 2]
    assert reader.counters()["duplicates"] == 2


def test_what_was_begun_and_given_up_is_not_mixed_with_the_frame_that_gets_its_number(by_hand, steps):
    """A sink whose record cannot be encoded has sent its ids by then; the next record has the same number."""
    reader, _, sender = by_hand
    writing = Writing(Large(7).resolve(), **numbers(1))
    say(sender, writing.token_ids(), *pieces(1))
    assert steps(reader, 1) == [1]
    writing = Writing(Large(7).resolve(), **numbers(2))
    say(sender, writing.token_ids(), (encode(Output(2).resolve(), **numbers(2)),), *pieces(3))
    assert steps(reader, 2) == [2, 3]


def test_messages_in_parts_that_are_no_pieces_are_skipped(by_hand, steps):
    reader, events, sender = by_hand
    (head, array), *_ = pieces(1)
    for message in (
        (b"garbage", b"more"),
        (head, array, b"more", b"and more"),
        (head[:-1], array),
        (whole(1)[0], b"more"),
    ):
        say(sender, message)
    say(sender, *pieces(1))
    assert steps(reader, 1) == [1]
    assert [type(event) for event in events] == [
        SessionStarted,
        *[FrameSkipped] * 3,
    ]  # the second was a piece, and more


def test_a_word_ahead_of_a_session_that_nobody_knows_is_no_session(opened):
    events = []
    reader = opened.reader(on_event=events.append)
    sender = ByHand(reader.url)
    say(sender, (seal_apart(FrameKind.COMING, 0, **numbers(0)),))
    assert reader.read(0.1) is None
    assert reader.cursors == {}
    assert events == []
    say(sender, (seal_apart(FrameKind.COMING, 0, **numbers(0)), b"more"))  # that is none
    assert reader.read(0.1) is None
    assert [type(event) for event in events] == [FrameSkipped]
    sender.context.destroy(linger=0)


@pytest.fixture
def kinds(monkeypatch):
    """The kinds of the frames that readers got, in order, without what they say of themselves."""
    from hal.reading import receiver

    found = []
    taken = receiver.Receiver._take_message

    def noted(self, identity, message, beside):
        found.append(FrameKind(read_header(message.buffer).kind))
        taken(self, identity, message, beside)

    monkeypatch.setattr(receiver.Receiver, "_take_message", noted)
    return lambda: [kind for kind in found if kind not in (FrameKind.STATE, FrameKind.BYE)]


def test_a_sink_sends_large_frames_in_pieces_and_small_ones_whole(opened, kinds):
    reader, sink = opened.reader(), opened.sink()
    for output in (Large(1), Output(2), Large(3)):
        sink.put(output)
        assert reader.read(10).record == output.resolve()
    parts = [FrameKind.TOKEN_IDS, FrameKind.ROWS, FrameKind.LOGPROBS]
    assert kinds() == [*parts, FrameKind.OUTPUT, *parts]
    assert sink.counters()["unacknowledged_bytes"] >= 0


def test_wide_ids_are_sent_narrow_where_they_fit(opened):
    class Wide(Large):
        def resolve(self):
            record = super().resolve()
            object.__setattr__(record, "logprob_token_ids", record.logprob_token_ids.astype(np.int64))
            return record

    class Wider(Wide):
        def resolve(self):
            record = super().resolve()
            record.logprob_token_ids[1, 1] = 1 << 40
            return record

    reader, sink = opened.reader(), opened.sink()
    for output, dtype in ((Wide(1), np.int32), (Wider(2), np.int64)):
        sink.put(output)
        found = reader.read(10).record
        assert found == output.resolve()
        assert found.logprob_token_ids.dtype == dtype


def test_g19_a_reader_that_comes_after_another_gets_what_had_begun_whole(opened, kinds):
    first, sink = opened.reader(auto_ack=False), opened.sink()
    for step in (1, 2):
        sink.put(Large(step))
        assert first.read(10).record.step == step
    first.close()
    second = opened.reader()
    assert [second.read(10).record.step for _ in range(2)] == [1, 2]
    assert kinds()[-2:] == [FrameKind.OUTPUT] * 2
    assert sink.counters()["resent"] == 2
    sink.put(Large(3))
    assert second.read(10).record.step == 3
    assert kinds()[-3:] == [FrameKind.TOKEN_IDS, FrameKind.ROWS, FrameKind.LOGPROBS]


def test_a_reader_that_does_not_know_pieces_gets_frames_whole(opened, kinds, monkeypatch):
    asked = Session.ask

    def ask(self, now, **how):
        sequence, cursor = asked(self, now, **how)
        cursor.pieces = False
        return sequence, cursor

    monkeypatch.setattr(Session, "ask", ask)
    reader, sink = opened.reader(), opened.sink()
    sink.put(Large(1))  # before the reader has said so
    for step in (1, 2):
        assert reader.read(10).record == Large(step).resolve()
        sink.put(Large(step + 1))
    assert kinds() == [FrameKind.OUTPUT] * 2


def test_a_record_that_cannot_be_encoded_fails_alone(opened):
    """Its ids have left by then."""
    reader, sink = opened.reader(), opened.sink()
    sink.put(Large(1))
    assert reader.read(10).record.step == 1
    bad = Large(2, requests=("\ud800", "b"))
    sink.put(bad)
    assert bad.done.wait(10)
    assert isinstance(bad.settled[0], InvalidValue)
    sink.put(Large(3))
    assert reader.read(10).record == Large(3).resolve()
    assert reader.counters() == {"frames": 2, "duplicates": 0, "skipped": 0}


def test_g18_frames_wait_for_room_piece_by_piece_and_none_is_lost(opened):
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


def test_cursors_say_that_a_reader_knows_pieces(opened):
    reader = opened.reader()
    sender = ByHand(reader.url)
    sender.say(sender.state(0))
    assert reader.read(0.1) is None
    message = memoryview(sender.socket.recv())
    assert read_control(read_header(message), message, Cursor).pieces
    sender.context.destroy(linger=0)
