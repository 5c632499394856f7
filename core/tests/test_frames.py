"""Frames: decoding an encoded frame is the identity, and any other bytes raise FrameError and no other error."""

import struct
from dataclasses import fields, replace
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hal_core.errors import FrameError, InvalidValue
from hal_core.frames import envelope as frames
from hal_core.output.record_terms import ALLOWED_FINISH
from hal_core.output.records import OutputRecord, SlotStatus, narrowed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests import share

#: Loaded machines are slow; that is not a failure.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
IDS = {"session": 0xFEDC_BA98_7654_3210, "sender": 7, "sequence": 1 << 40}
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
request_id = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12)


def drawn_array(draw, dtype, elements, size):
    return np.array(draw(st.lists(elements, min_size=size, max_size=size)), dtype)


@st.composite
def records(draw, max_rows=6):
    """Records of every combination of optional parts and statuses, including ones that no producer makes yet."""
    ids = tuple(draw(st.lists(request_id, max_size=max_rows), label="request ids"))
    status = drawn_array(draw, np.uint8, st.sampled_from(SlotStatus), len(ids))
    finish = [draw(st.sampled_from(ALLOWED_FINISH[row].nonzero()[0].tolist())) for row in status]
    counts = np.array([draw(st.integers(1, 7)) if row == SlotStatus.TOKEN else 0 for row in status], np.int32)
    tokens = drawn_array(draw, np.int64, draw(st.sampled_from([st.integers(0, 150_000), int64])), int(counts.sum()))
    optional = {}
    if draw(st.booleans(), label="drafts"):
        optional["draft_counts"] = drawn_array(draw, np.int32, st.integers(0, 5), len(ids))
        optional["drafts"] = drawn_array(draw, np.int64, int64, int(optional["draft_counts"].sum()))
    for prefix, named in (("", tokens), ("draft_", optional.get("drafts"))):
        if named is not None and (columns := draw(st.integers(0, 4), label="columns")):
            shape = (len(named), columns)
            wide = drawn_array(draw, np.int64, st.sampled_from([-1, 5, 1 << 40]), len(named) * columns).reshape(shape)
            wide[:, 0] = named
            optional[prefix + "logprob_token_ids"] = narrowed(wide) if draw(st.booleans(), label="narrow") else wide
            logprobs = drawn_array(draw, np.float32, st.floats(width=32), len(named) * columns)
            optional[prefix + "logprobs"] = logprobs.reshape(shape)
            if draw(st.booleans(), label="ranks"):
                optional[prefix + "ranks"] = drawn_array(draw, np.int32, st.integers(-1, 1 << 30), len(named))
    if ids:
        text = st.text(st.characters(exclude_categories=("Cs",)))
        optional["messages"] = draw(st.dictionaries(st.integers(0, len(ids) - 1), text))
    return OutputRecord(
        draw(st.integers(0, (1 << 63) - 1), label="step"),
        ids,
        status,
        np.array(finish, np.uint8),
        drawn_array(draw, np.int64, st.integers(0, (1 << 63) - 1), len(ids)),
        counts,
        tokens,
        np.array([bool(row) and draw(st.booleans()) for row in counts], np.bool_),
        **optional,
    )


def plain(rows=2, columns=0):
    optional = {}
    if columns:
        ids = np.arange(rows * columns).reshape(rows, columns)
        ids[:, 0] = np.arange(rows)
        optional = {"logprob_token_ids": ids, "logprobs": np.zeros((rows, columns), np.float32)}
    ones, zeros = np.ones(rows, np.uint8), np.zeros(rows, np.uint8)
    names, order = tuple(f"r{row}" for row in range(rows)), np.arange(rows)
    return OutputRecord(3, names, ones, zeros, order, ones.astype(np.int32), order, zeros.astype(bool), **optional)


SMALL, LARGE = frames.encode(plain(), **IDS), frames.encode(plain(400, 21), **IDS)


def framed(body, kind=frames.FrameKind.OUTPUT):
    """A frame with a valid header and valid checksums around any body."""
    return frames.seal(kind, body, **IDS)


def readable(buffer):
    """Whether the bytes are a frame; any exception but FrameError fails the test, and so does an invalid record."""
    try:
        record = frames.decode(buffer).record
    except FrameError:
        return False
    assert replace(record) == record  # its constructor checks everything again
    return True


@UNTIMED
@given(records(), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1))
def test_g19_decode_of_encode_is_the_identity(record, session, sender, sequence):
    frame = frames.decode(frames.encode(record, session=session, sender=sender, sequence=sequence))
    assert frame.record == record
    assert (frame.header.session, frame.header.sender, frame.header.sequence) == (session, sender, sequence)


@pytest.mark.parametrize("record", [plain(0), plain(1), plain(128), plain(400, 21), plain(512, 40)], ids=len)
def test_large_and_empty_records_come_back_too(record):
    buffer = frames.encode(record, **IDS)
    frame = frames.decode(buffer)
    assert frame.record == record
    assert frame.header.total_length == len(buffer)
    assert bool(frame.header.flags & frames.HAS_TRAILER) == (len(buffer) > frames.CHECKED_BODY + frames.HEADER_LENGTH)


def test_the_header_is_the_documented_table():
    """Written by hand from the table in the module's docstring: this test must never need a change."""
    fields = struct.unpack("<4sBBHHHIQQQ16sII", SMALL[:64])
    assert fields[:6] == (b"HALf", 1, fields[2], 64, 1, 1)
    assert fields[6:10] == (7, len(SMALL), 0xFEDC_BA98_7654_3210, 1 << 40)
    assert fields[10:] == (bytes(16), crc32(SMALL[64:]), crc32(SMALL[:60]))
    assert struct.unpack("<QQ", LARGE[-16:]) == (len(LARGE), 1 << 40)


@settings(UNTIMED, max_examples=share.of(300))
@given(st.binary(max_size=300))
@example(b"")
@example(SMALL[:64])
def test_any_bytes_are_no_frame(data):
    assert not readable(data)


@settings(UNTIMED, max_examples=share.of(500))
@given(st.binary(max_size=200))
def test_any_body_within_a_sound_frame_is_a_record_or_a_frame_error(body):
    readable(framed(body))


OPTIONAL_PARTS = ("columns", "dcounts", "drafts", "lids", "lps", "ranks", "msgs", "dcolumns", "dlids", "dlps", "dranks")
BODY = msgspec.msgpack.decode(SMALL[64:])
packable = st.one_of(
    st.none(), st.booleans(), int64, st.binary(max_size=40), st.text("a\0é", max_size=5), st.lists(int64, max_size=3)
)


@settings(UNTIMED, max_examples=share.of(500))
@given(st.dictionaries(st.sampled_from([*BODY, *OPTIONAL_PARTS]), packable))
@example({"columns": 1 << 40, "lids": b"", "lps": b""})
@example({"columns": 1, "lids": b"", "lps": b""})
@example({"dcolumns": 1, "dlids": b"", "dlps": b""})
@example({"dcounts": bytes(8), "drafts": b"", "dcolumns": 1 << 40, "dlids": b"", "dlps": b""})
@example({"dcounts": bytes(8), "drafts": b"", "dranks": b""})
@example({"msgs": {-1: "x"}})
@example({"counts": b"\xff" * 8, "tokens": b""})
@example({"counts": b"\xff\xff\xff\x7f" * 2, "tokens": bytes(16)})
@example({"rows": 0, "status": b"", "finish": b"", "first": b"", "counts": b"", "tokens": b"", "pos": b""})
@example({"first": b"\2\0"})
@example({"pos": bytes(8) + b"\xff" * 8})
@example({"pos": bytes(8) + b"\xff" * 4})
@example({"rows": 3})
@example({"tokens": bytes(24)})
@example({"step": 1 << 63})
def test_any_value_of_any_part_is_a_record_or_a_frame_error(changes):
    assert readable(SMALL)  # its rows are remembered; all other parts must be checked nevertheless
    readable(framed(msgspec.msgpack.encode(BODY | changes)))


@pytest.mark.parametrize(
    "body", [b"\x81\xa1x\xdd\xff\xff\xff\xff", b"\x81\xa1x" + b"\x91" * 50_000, b"\xdf" + b"\xff" * 4]
)
def test_lengths_within_a_body_are_not_believed(body):
    """A count of four thousand million elements, and endless nesting, in a few bytes."""
    assert not readable(framed(body))


@pytest.mark.parametrize("buffer", [SMALL, LARGE], ids=["small", "large"])
@UNTIMED
@given(st.data())
def test_every_truncated_frame_is_refused(buffer, data):
    assert not readable(buffer[: data.draw(st.integers(0, len(buffer) - 1), label="length")])
    assert not readable(buffer + b"\0")


@settings(UNTIMED, max_examples=share.of(500))
@given(st.integers(0, len(SMALL) * 8 - 1))
def test_every_flipped_bit_of_a_small_frame_is_found(bit):
    changed = bytearray(SMALL)
    changed[bit // 8] ^= 1 << bit % 8
    assert not readable(changed)


@UNTIMED
@given(st.integers(0, 64 * 8 - 1), st.sampled_from([0, len(LARGE) - 64]))
def test_a_flipped_bit_in_a_large_frames_head_is_found(bit, offset):
    changed = bytearray(LARGE)
    changed[offset + bit // 8] ^= 1 << bit % 8
    in_trailer = offset + bit // 8 >= len(LARGE) - 16
    assert not (readable(changed) and (offset == 0 or in_trailer))


def resealed(changes):
    """SMALL with other header bytes and a matching header checksum."""
    head = bytearray(SMALL[:60])
    for offset, data in changes.items():
        head[offset : offset + len(data)] = data
    return bytes(head) + struct.pack("<I", crc32(head)) + SMALL[64:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: b"HALT"}, "magic"),
        ({4: b"\2"}, "version 2, but this reader needs 1.*install one version"),
        ({6: b"\x48\0"}, "length 72"),
        ({8: b"\2\0"}, "kind 2 carries no record"),
        ({10: b"\0\0"}, "neither checksum nor trailer"),
        ({10: b"\4\0"}, "flags 4"),
        ({10: b"\2\0"}, "at the end differ"),
        ({16: b"\3\0\0\0"}, "total 3"),
        ({16: b"\xff" * 8}, "the header gives"),
    ],
)
def test_g26_a_wrong_header_is_named(changes, message):
    with pytest.raises(FrameError, match=message):
        frames.decode(resealed(changes))


def test_what_later_revisions_add_is_skipped():
    body = msgspec.msgpack.encode(BODY | {"later": [1, {"x": b"y"}], "z": None})
    later = bytearray(framed(body))
    later[5], later[40:56] = 9, b"r" * 16
    later[60:64] = struct.pack("<I", crc32(later[:60]))
    assert frames.decode(later).record == plain()


@UNTIMED
@given(st.lists(st.sampled_from([SMALL, LARGE, framed(b"", kind=77)]), max_size=5), st.integers(0, 200))
def test_consecutive_frames_are_split_up_to_the_first_torn_one(several, cut):
    joined = b"".join(several)
    found = []
    try:
        for _, frame in frames.split(joined[: len(joined) - cut] if cut else joined):
            found.append(bytes(frame))
    except FrameError:
        assert cut
    assert found == several[: len(found)]
    assert cut or len(found) == len(several)


@given(data=st.binary(max_size=300), times=st.integers(1, 300))
@UNTIMED
def test_the_checksum_of_a_body_is_the_one_of_zlib_whoever_computes_it(data, times):
    data *= times
    assert frames.body_crc32(data) == frames.body_crc32(memoryview(data)) == crc32(data)


def test_numbers_beyond_a_header_and_ids_without_text_are_refused():
    with pytest.raises(InvalidValue, match="sequence -1"):
        frames.encode(plain(), session=1, sender=0, sequence=-1)
    record = plain(1)
    lone = OutputRecord(0, ("\ud800",), *(getattr(record, item.name) for item in fields(record)[2:8]))
    with pytest.raises(InvalidValue, match="cannot be encoded"):
        frames.encode(lone, **IDS)


def test_a_step_of_few_requests_is_small():
    """8 requests with 2 tokens and top-20 each: about 3 KB, not the 530 KB of the legacy message."""
    tokens = np.arange(16)
    ids = np.arange(16 * 21).reshape(16, 21)
    ids[:, 0] = tokens
    ones = np.ones(8, np.uint8)
    record = OutputRecord(
        1,
        tuple(f"request-{row}" for row in range(8)),
        ones,
        ones * 0,
        np.zeros(8, np.int64),
        ones.astype(np.int32) * 2,
        tokens,
        ones < 0,
        logprob_token_ids=ids,
        logprobs=np.zeros((16, 21), np.float32),
        ranks=np.zeros(16, np.int32),
    )
    assert len(frames.encode(record, **IDS)) < 3400
