"""Pieces of large frames: in any order they are the record again, and what does not belong together is a FrameError."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import msgspec
import numpy as np
import pytest
from hal_core.errors import FrameError, InvalidValue
from hal_core.frames import pieces as frame_pieces
from hal_core.frames.envelope import FrameKind, decode, encode, read_header, seal, seal_apart, split
from hal_core.frames.pieces import PIECES, Reading, Writing, apart, is_large, is_word_ahead
from hal_core.output.records import OutputRecord
from hypothesis import given
from hypothesis import strategies as st

from .test_frames import IDS, UNTIMED, records

NUMBERS = {"session": 5, "sender": 2, "sequence": 9}


def record(rows=3, columns=2, **changes):
    """A record of one token a row, with log-probabilities."""
    ones = np.ones(rows, np.uint8)
    ids = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    ids[:, 0] = np.arange(rows)
    fields = {
        "logprob_token_ids": ids,
        "logprobs": -np.arange(rows * columns, dtype=np.float32).reshape(rows, columns),
        "ranks": np.zeros(rows, np.int32),
    }
    names = tuple(f"r{row}" for row in range(rows))
    fields |= {"counts": ones.astype(np.int32), "tokens": np.arange(rows), "first_token": ones < 0}
    return OutputRecord(7, names, ones, ones * 0, np.arange(rows), **(fields | changes))


def messages(source, numbers=NUMBERS):
    """The pieces as a reader gets them: headers, and frames or arrays."""
    writing = Writing(source, **numbers)
    rows = memoryview(writing.rows())
    found = [next(apart(memoryview(head), array)) for head, array in (writing.token_ids(), writing.logprobs())]
    return [found[0], (read_header(rows), rows), found[1]]


def read(pieces, sequence=9):
    reading = Reading(sequence)
    return [reading.take(header, data) for header, data in pieces]


@UNTIMED
@given(records().filter(lambda found: found.logprobs is not None and len(found.tokens)), st.permutations(range(3)))
def test_pieces_in_any_order_are_the_record_again(source, order):
    *before, frame = read([messages(source, IDS)[at] for at in order])
    assert before == [None, None]
    assert frame.record == source
    header = frame.header
    assert (header.kind, header.session, header.sender, header.sequence) == (FrameKind.OUTPUT, *IDS.values())
    for name in ("logprob_token_ids", "logprobs"):
        assert not getattr(frame.record, name).flags.writeable
    assert replace(frame.record) == source  # it stands a record's own checks


def test_arrays_are_neither_copied_when_they_go_nor_when_they_come():
    source = record()
    (_, ids), (_, logprobs) = Writing(source, **NUMBERS).token_ids(), Writing(source, **NUMBERS).logprobs()
    assert np.shares_memory(np.frombuffer(ids, np.int32), source.logprob_token_ids)
    assert np.shares_memory(np.frombuffer(logprobs, np.float32), source.logprobs)
    found = read(messages(source))[-1].record
    assert np.shares_memory(found.logprob_token_ids, source.logprob_token_ids)
    assert np.shares_memory(found.logprobs, source.logprobs)


def test_a_record_is_large_by_its_alternatives_alone():
    assert [is_large(record(1, columns)) for columns in (8192, 8193)] == [False, True]  # 65,536 bytes, and 8 more
    wide = record(1, 8192)
    object.__setattr__(wide, "logprob_token_ids", wide.logprob_token_ids.astype(np.int64))  # they travel narrow
    assert not is_large(wide)
    assert not is_large(record(10_000, 1, logprob_token_ids=None, logprobs=None, ranks=None))


def spoilt(**changes):
    """The pieces of a record whose rows were changed on the way, with a sound checksum."""
    ids, (_, rows), logprobs = messages(record())
    body = msgspec.msgpack.decode(rows[64:])
    body |= changes
    frame = memoryview(seal(FrameKind.ROWS, msgspec.msgpack.encode(body), **NUMBERS))
    return [ids, (read_header(frame), frame), logprobs]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"apart": None}, "wait for nothing"),
        ({"columns": 0}, "wait for nothing"),
        ({"columns": 1 << 21}, "wait for nothing"),
        ({"columns": 3}, "are not 9 ids"),
        ({"apart": (24, 20)}, "are not 6 ids"),
        ({"apart": (20, 24)}, "are not 6 ids"),
        ({"apart": (48, 24)}, "24 bytes of an array came, not 48"),
        ({"lps": b"\0" * 24}, "wait for nothing"),
        ({"lids": b"\0" * 24}, "wait for nothing"),
        ({"ranks": b"\0" * 11}, "11 bytes are not 3"),
        ({"tokens": np.array([0, 1, 5]).tobytes()}, "column 0 .* row 2"),
        ({"tokens": np.array([5, 1, 2]).tobytes()}, "column 0 .* row 0"),
        ({"status": b"\1\1"}, "rows"),
        ({"counts": b"\1\0\0\0" * 2 + b"\2\0\0\0"}, "tokens|integers"),
        ({"apart": "text"}, "no record"),
    ],
)
def test_g25_rows_that_do_not_fit_are_refused(changes, what):
    with pytest.raises(FrameError, match=what):
        read(spoilt(**changes))


def test_rows_without_ranks_are_rows():
    source = record(ranks=None)
    assert read(messages(source))[-1].record == source


def test_ids_of_another_frame_are_noticed_however_many_rows_there_are():
    """A few rows are looked at; arrays of another frame differ in them."""
    source, other = record(rows=5000), record(rows=5000)
    moved = replace(other, tokens=other.tokens + 1, logprob_token_ids=other.logprob_token_ids + 1)
    _, *others = messages(source)
    for order in permutations((messages(moved)[0], *others)):
        with pytest.raises(FrameError, match="column 0"):
            read(order)


@pytest.mark.parametrize("row", [0, 4999])
def test_the_first_and_the_last_row_are_among_those_that_are_looked_at(row):
    tokens = np.arange(5000)
    tokens[row] = -1
    ids, *_ = messages(record(rows=5000))
    other = record(rows=5000, tokens=tokens, logprob_token_ids=None, logprobs=None, ranks=None)
    changed = replace(other, logprob_token_ids=np.stack([tokens, tokens], 1), logprobs=np.zeros((5000, 2), np.float32))
    with pytest.raises(FrameError, match=f"row {row} "):
        read([ids, *messages(changed)[1:]])


def test_what_is_held_for_it_counts_a_copy_of_the_ids():
    source = record(5, 4)
    assert Writing(source, **NUMBERS).held == Writing(source, **NUMBERS).nbytes == 160
    object.__setattr__(source, "logprob_token_ids", source.logprob_token_ids.astype(np.int64))
    writing = Writing(source, **NUMBERS)
    assert (writing.nbytes, writing.held) == (160, 320)


def test_g25_arrays_that_no_frame_could_hold_whole_are_refused_before_any_has_left(monkeypatch):
    monkeypatch.setattr(frame_pieces, "MOST_BYTES", 23)
    with pytest.raises(InvalidValue, match="more than 23 bytes"):
        Writing(record(), **NUMBERS)


def test_g25_a_reader_keeps_no_array_of_any_size_before_it_has_the_rows(monkeypatch):
    ids, rows, logprobs = messages(record())
    monkeypatch.setattr(frame_pieces, "MOST_AHEAD", 23)
    for first in (ids, logprobs):
        with pytest.raises(FrameError, match="24 bytes came before its rows"):
            read([first])
    assert read([rows, ids, logprobs])[-1].record == record()


def test_arrays_of_a_wrong_length_are_refused_at_once_and_at_the_end():
    source = record()
    head, array = Writing(source, **NUMBERS).token_ids()
    for message, beside in (
        (memoryview(head), array[1:]),
        (memoryview(head + b"x"), array),
        (memoryview(head)[:63], array),
        (memoryview(seal_apart(FrameKind.TOKEN_IDS, len(array) + 1, **NUMBERS)), array),
    ):
        with pytest.raises(FrameError):
            list(apart(message, beside))
    ids, rows, logprobs = messages(source)
    for pieces in ([(ids[0], ids[1][4:]), rows], [rows, (ids[0], ids[1][4:])], [ids, rows, (logprobs[0], ids[1][4:])]):
        with pytest.raises(FrameError, match="20 bytes of an array came, not 24"):
            read(pieces)


def test_whole_frames_and_rows_are_not_taken_for_each_other():
    source = record()
    whole = memoryview(encode(source, **NUMBERS))
    with pytest.raises(FrameError, match="no piece"):
        read([(read_header(whole), whole)])
    header, rows = messages(source)[1]
    with pytest.raises(FrameError, match="carries no record"):
        decode(rows)
    body = rows[64:]
    with pytest.raises(FrameError, match="missing"):
        decode(seal(FrameKind.OUTPUT, bytes(body), **NUMBERS))
    torn = memoryview(bytes(rows[:-1]) + b"\0")
    with pytest.raises(FrameError, match="checksum"):
        read([(header, torn)])


def test_rows_that_cannot_be_encoded_say_so():
    with pytest.raises(InvalidValue, match="cannot be encoded"):
        Writing(record(messages={0: "\ud800"}), **NUMBERS).rows()


@UNTIMED
@given(st.binary(max_size=300))
def test_any_bytes_are_rows_or_a_frame_error(data):
    frame = memoryview(seal(FrameKind.ROWS, data, **NUMBERS))
    ids, _, logprobs = messages(record())
    try:
        found = read([ids, (read_header(frame), frame), logprobs])[-1]
    except FrameError:
        return
    assert replace(found.record) == found.record


def test_a_word_ahead_is_a_header_alone_and_nothing_else_is_one():
    word = seal_apart(FrameKind.COMING, 0, **NUMBERS)
    assert is_word_ahead(memoryview(word))
    ((header, frame),) = split(word)  # a frame like any other, for readers that look
    assert (header.kind, len(frame)) == (FrameKind.COMING, 64)
    for other in (word + b"x", word[:-1], b"hal" + word[3:], seal_apart(FrameKind.TOKEN_IDS, 0, **NUMBERS), b""):
        assert not is_word_ahead(memoryview(other))
    assert {FrameKind.TOKEN_IDS, FrameKind.ROWS, FrameKind.LOGPROBS} == PIECES
    assert frame_pieces.__doc__ is not None
    assert all(kind.name in frame_pieces.__doc__ for kind in map(FrameKind, PIECES))
