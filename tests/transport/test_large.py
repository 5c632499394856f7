"""How large frames go: in pieces the first time, whole when asked for again, whatever the transport has room for."""

from __future__ import annotations

import pytest
from hal_core.errors import InvalidValue
from hal_core.frames.envelope import FrameKind, decode, encode, read_header
from hal_core.frames.pieces import PIECES, Reading, apart
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.transport.large import InMemory, InPieces, Parts
from hal.transport.window import Window

from .conftest import Large

NUMBERS = {"session": 5, "sender": 0, "sequence": 1}
RECORD = Large(1).resolve()


class Transport:
    """Takes a message or has no room, as it is told; keeps what it took."""

    def __init__(self, room=()):
        self.room, self.taken = list(room), []

    def send(self, message):
        if self.room and not self.room.pop(0):
            return False
        self.taken.append(message)
        return True

    def kinds(self):
        return [FrameKind(read_header(memoryview(message[0])).kind) for message in self.taken]

    def record(self):
        """What a reader makes of the messages."""
        reading = Reading(1)
        for message in self.taken:
            head = memoryview(message[0])
            if len(message) > 1:
                (found,) = apart(head, message[1])
            elif read_header(head).kind in PIECES:
                found = read_header(head), head
            else:
                return decode(message[0]).record
            frame = reading.take(*found)
        return frame.record


def pieces():
    frame = InPieces(RECORD, NUMBERS)
    frame.encode()
    return frame


def test_the_ids_leave_before_the_rows_are_encoded():
    transport, frame = Transport(), InPieces(RECORD, NUMBERS)
    frame.begin(transport.send)
    assert transport.kinds() == [FrameKind.TOKEN_IDS]
    frame.encode()
    assert frame.send(transport.send)
    assert transport.kinds() == [FrameKind.TOKEN_IDS, FrameKind.ROWS, FrameKind.LOGPROBS]
    assert transport.record() == RECORD
    assert frame.send(transport.send)  # nothing is due any more
    assert len(transport.taken) == 3


def test_its_length_is_what_goes():
    transport, frame = Transport(), pieces()
    frame.send(transport.send)
    assert len(frame) == sum(len(message[-1]) for message in transport.taken)
    assert bytes(frame) == encode(RECORD, **NUMBERS)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.lists(st.sampled_from(["send", "restart"]), max_size=12), st.booleans())
def test_g19_whatever_is_refused_and_asked_for_again_the_last_reader_gets_the_record(room, moves, early):
    transport, frame = Transport(room), InPieces(RECORD, NUMBERS)
    if early:
        frame.begin(transport.send)
    frame.encode()
    for move in moves:
        if move == "restart":
            begun = bool(transport.taken)
            frame.restart()
            whole = begun or getattr(transport, "whole", False)
            transport = Transport(transport.room)
            transport.whole = whole
        else:
            frame.send(transport.send)
    transport.room.clear()
    assert frame.send(transport.send)
    if getattr(transport, "whole", False):
        assert transport.kinds() == [FrameKind.OUTPUT]
    assert transport.record() == RECORD


def test_what_it_delivers_is_told_without_making_the_frame(monkeypatch):
    laid = InMemory(Parts((encode(RECORD, **NUMBERS),)), lambda parts: None)
    frame = pieces()
    monkeypatch.setattr(InPieces, "__bytes__", lambda self: pytest.fail("made"))
    assert frame.deliveries() == laid.deliveries() == RECORD.deliveries() == [("a", 1, 1), ("b", 1, 1)]


def test_a_large_frame_is_never_joined_to_small_ones():
    window = Window()
    for frame in (b"one", b"two", pieces(), b"three"):
        window.add(frame)
    assert window.message(1 << 30) == (b"onetwo", 2)
    window.sent(2)
    assert isinstance(window.message(1 << 30)[0], InPieces)


def test_what_waits_whole_is_encoded_once(monkeypatch):
    frame, made = pieces(), []
    monkeypatch.setattr(InPieces, "__bytes__", lambda self: made.append(1) or encode(RECORD, **NUMBERS))
    frame.keep_whole()
    transport = Transport([False, False, True])
    while not frame.send(transport.send):
        pass
    assert transport.kinds() == [FrameKind.OUTPUT]
    assert made == [1]


def test_a_record_that_cannot_be_encoded_is_said_before_it_is_held():
    output = Large(1, requests=("\ud800",))
    frame = InPieces(output.resolve(), NUMBERS)
    with pytest.raises(InvalidValue, match="cannot be encoded"):
        frame.encode()


class Memory:
    """Shared memory with room or without."""

    def __init__(self, word):
        self.word, self.laid = word, []

    def lay(self, parts):
        target = bytearray(len(parts))
        parts.write_to(memoryview(target))
        self.laid.append(bytes(target))
        return self.word


@pytest.mark.parametrize("word", [b"a word", None])
def test_memory_is_tried_once_and_then_it_goes_whole(word):
    memory, transport = Memory(word), Transport([False, False, True])
    frame = InMemory(Parts((b"head", memoryview(b"body"), b"tail")), memory.lay)
    assert len(frame) == 12
    while not frame.send(transport.send):
        pass
    assert memory.laid == [b"headbodytail"]
    assert transport.taken == [(word or b"headbodytail",)]
    frame.restart()
    assert frame.send(transport.send)
    assert transport.taken[1:] == [(b"headbodytail",)]
    assert len(memory.laid) == 1


def test_a_word_that_had_no_room_is_not_sent_to_a_reader_that_came_later():
    memory, transport = Memory(b"a word"), Transport([False])
    frame = InMemory(Parts((b"whole",)), memory.lay)
    assert not frame.send(transport.send)
    frame.restart()
    assert frame.send(transport.send)
    assert transport.taken == [(b"whole",)]


def test_a_window_restarts_the_frames_that_it_sends_again():
    window, transport = Window(), Transport()
    for number in range(1, 4):
        frame = InPieces(RECORD, NUMBERS | {"sequence": number})
        frame.encode()
        window.add(frame)
    for _ in range(2):
        message, count = window.message(1 << 30)
        assert count == 1
        assert message.send(transport.send)
        window.sent(1)
    window.rewind(1)
    transport.taken.clear()
    for _ in range(2):
        message, _ = window.message(1 << 30)
        assert message.send(transport.send)
        window.sent(1)
    kinds = [FrameKind.OUTPUT, FrameKind.TOKEN_IDS, FrameKind.ROWS, FrameKind.LOGPROBS]  # the third had not begun
    assert transport.kinds() == kinds
