"""The body of an output frame: a record as a MessagePack map (:mod:`hal_core.frames.envelope` describes the frame).

Arrays are written as their bytes, without a loop over tokens; missing parts are left out. A reader skips unknown names,
so a later revision may add optional parts.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hal_core.errors import FrameError, InvalidValue
from hal_core.output.record_terms import BOOL, FLOAT32, INT32, INT64, OPTIONAL, UINT8
from hal_core.output.records import OutputRecord, assemble, narrowed
from hal_core.slots.request_ids import join_request_ids

MAX_COLUMNS = 1 << 20  #: most log-probability columns that a reader accepts


Part = bytes | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Body(msgspec.Struct, omit_defaults=True, gc=False):
    """The body of an output frame. Names are short because every frame carries them.

    Parts with a few bytes per row are copied out of the message; parts with many bytes per token are views of it.
    """

    step: Count
    rows: Count
    ids: str  #: request ids joined by NUL characters
    status: bytes
    finish: bytes
    pos: bytes
    counts: bytes
    tokens: bytes
    first: bytes
    dcounts: bytes | None = None
    drafts: bytes | None = None
    columns: Count = 0  #: K+1, 0 without log-probabilities
    lids: memoryview | None = None
    lps: memoryview | None = None
    ranks: memoryview | None = None
    msgs: dict[int, str] | None = None
    dcolumns: Count = 0  #: as ``columns``, ``lids``, ``lps`` and ``ranks``, of the drafts
    dlids: memoryview | None = None
    dlps: memoryview | None = None
    dranks: memoryview | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Body)
#: Exceptions that decoding invalid bytes may raise, apart from FrameError
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)
CURE = "send the frame again; if that fails too, install one version of hal on both sides"


def encode_body(record: OutputRecord) -> tuple[Part, ...]:
    """Return the record as the body of a frame, in consecutive parts: large arrays are not copied."""
    try:
        body = _body_of(record)
        if record.logprobs is None and record.draft_logprobs is None:
            return (_encoder.encode(body),)
        large = {name: getattr(body, name) for name in _LARGE if getattr(body, name) is not None}
        for name in large:
            setattr(body, name, None)
        return _with_entries(_encoder.encode(body), large)
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError) as error:
        what = f"the record cannot be encoded: {error}"
        raise InvalidValue(what, hook="save_output", argument="record") from error


_LARGE = ("lids", "lps", "ranks", "dlids", "dlps", "dranks")


def _with_entries(encoded: bytes, entries: dict[str, memoryview]) -> tuple[Part, ...]:
    """Return a MessagePack map of less than 2**16 entries with more, binary entries appended."""
    if encoded[0] == 0xDE:  # map 16 has the count next; a fixmap has it in its first byte
        count, begin = int.from_bytes(encoded[1:3], "big"), 3
    else:
        count, begin = encoded[0] & 0x0F, 1
    parts: list[Part] = [b"\xde" + (count + len(entries)).to_bytes(2, "big"), memoryview(encoded)[begin:]]
    for name, data in entries.items():
        parts.append(bytes((0xA0 | len(name),)) + name.encode() + b"\xc6" + data.nbytes.to_bytes(4, "big"))
        if data.nbytes:
            parts.append(data.cast("B"))
    return tuple(parts)


def decode_body(data: memoryview) -> OutputRecord:
    """Return the record that the body holds; arrays may be views of the body. Raises only FrameError."""
    try:
        return _record_of(_decoder.decode(data))
    except FrameError:
        raise
    except _UNREADABLE as error:
        raise FrameError(f"the body is not a record: {error}", cure=CURE) from error


def _body_of(record: OutputRecord) -> Body:
    body = Body(
        record.step,
        len(record.request_ids),
        join_request_ids(record.request_ids),
        record.status.tobytes(),
        record.finish.tobytes(),
        record.positions.tobytes(),
        record.counts.tobytes(),
        record.tokens.tobytes(),
        record.first_token.tobytes(),
    )
    if record.draft_counts is not None and record.drafts is not None:
        body.dcounts, body.drafts = record.draft_counts.tobytes(), record.drafts.tobytes()
    if record.logprob_token_ids is not None and record.logprobs is not None:
        body.columns, body.lps = record.logprobs.shape[1], record.logprobs.data
        body.lids = narrowed(record.logprob_token_ids).data
        body.ranks = None if record.ranks is None else record.ranks.data
    if record.draft_logprob_token_ids is not None and record.draft_logprobs is not None:
        body.dcolumns, body.dlps = record.draft_logprobs.shape[1], record.draft_logprobs.data
        body.dlids = narrowed(record.draft_logprob_token_ids).data
        body.dranks = None if record.draft_ranks is None else record.draft_ranks.data
    if record.messages:
        body.msgs = dict(record.messages)
    return body


class _Rows:
    """The parts of a body that do not change while the batch does not, and their decoded values."""

    __slots__ = ("fields", "key", "names", "tokens")

    def __init__(self, key: tuple[str, bytes, bytes, bytes, bytes], names: tuple[str, ...]) -> None:
        _, status, finish, counts, first = key
        numbers = np.frombuffer(counts, INT32)
        self.key = key  #: ids, status, finish, counts, first
        self.names = names
        self.tokens = _total(numbers)
        #: A record's fields except step, positions and tokens; without optional parts.
        self.fields: dict[str, Any] = {
            "request_ids": names,
            "status": np.frombuffer(status, UINT8),
            "finish": np.frombuffer(finish, UINT8),
            "counts": numbers,
            "first_token": np.frombuffer(first, BOOL),
            **dict.fromkeys(OPTIONAL),
            "messages": {},
        }


def _record_of(body: Body) -> OutputRecord:
    global _last_rows
    rows, key = _last_rows, (body.ids, body.status, body.finish, body.counts, body.first)
    options: tuple[object, ...] = (body.columns or None, body.dcounts, body.drafts, body.lids, body.lps, body.ranks)
    options += (body.msgs, body.dcolumns or None, body.dlids, body.dlps, body.dranks)
    known = rows.key == key
    if not known:
        rows = _read_rows(key)
    if body.rows != len(rows.names):
        raise FrameError(f"{len(rows.names)} request ids for {body.rows} rows", cure=CURE)
    values = rows.fields.copy()
    values["step"] = body.step
    if body.pos[7::8].isascii() and len(body.pos) == 8 * body.rows:  # no sign bit is set
        values["positions"] = np.frombuffer(body.pos, INT64)
    else:
        values["positions"], known = _wide(body.pos, body.rows), False
    values["tokens"] = _wide(body.tokens, rows.tokens)
    if options != _ABSENT:
        values |= _options(body, rows.tokens)
    record = assemble(values, checked=known)
    _last_rows = rows
    return record


_ABSENT = (None,) * 11


def _read_rows(key: tuple[str, bytes, bytes, bytes, bytes]) -> _Rows:
    """Check lengths and flags; the record checks the values."""
    joined, status, finish, counts, first = key
    rows = len(status)
    if len(finish) != rows or len(first) != rows or len(counts) != 4 * rows:
        raise FrameError(f"the arrays do not all have {rows} rows", cure=CURE)
    if first.translate(None, b"\0\1"):  # any other byte would be a bool with which NumPy computes wrong results
        raise FrameError("a flag is neither 0 nor 1", cure=CURE)
    last = _last_rows
    return _Rows(key, last.names if joined == last.key[0] else tuple(joined.split("\0") if joined else ()))


def _options(body: Body, tokens: int) -> dict[str, Any]:
    """Return the optional parts of a record."""
    if (body.dcounts is None) != (body.drafts is None):
        raise FrameError("parts that belong together do not fit", cure=CURE)
    drafts = draft_counts = None
    if body.dcounts is not None and body.drafts is not None:
        draft_counts = _sized(body.dcounts, INT32, body.rows)
        drafts = _wide(body.drafts, _total(draft_counts))
    of_tokens = _logprobs(body.columns, body.lids, body.lps, body.ranks, tokens)
    of_drafts = _logprobs(body.dcolumns, body.dlids, body.dlps, body.dranks, None if drafts is None else len(drafts))
    found = (draft_counts, drafts, *of_tokens, *of_drafts)
    return {**dict(zip(OPTIONAL, found, strict=True)), "messages": body.msgs or {}}


def _logprobs(
    columns: int, ids: memoryview | None, logprobs: memoryview | None, ranks: memoryview | None, tokens: int | None
) -> tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]:
    """Return token ids, log-probabilities and ranks of so many tokens; ``tokens`` None: the tokens are missing."""
    lone = len({bool(columns), ids is not None, logprobs is not None}) > 1 or (ranks is not None and logprobs is None)
    if lone or columns > MAX_COLUMNS or (tokens is None and ids is not None):
        raise FrameError("parts that belong together do not fit", cure=CURE)
    if ids is None or logprobs is None or tokens is None:
        return None, None, None
    shape = (tokens, columns)
    narrow = len(ids) == 4 * tokens * columns
    return (
        _sized(ids, INT32 if narrow else INT64, tokens * columns).reshape(shape),
        _sized(logprobs, FLOAT32, tokens * columns).reshape(shape),
        None if ranks is None else _sized(ranks, INT32, tokens),
    )


def _total(counts: NDArray[np.int32]) -> int:
    """Return the sum; in the plain case, one token a row, without adding."""
    rows = len(counts)
    return rows if counts.tobytes() == b"\1\0\0\0" * rows else int(np.add.reduce(counts, dtype=INT64))


def _sized(data: bytes | memoryview, dtype: np.dtype[Any], elements: int) -> NDArray[Any]:
    if len(data) != dtype.itemsize * elements:
        raise FrameError(f"{len(data)} bytes are not {elements} of {dtype}", cure=CURE)
    return np.frombuffer(data, dtype)


def _wide(data: bytes | memoryview, elements: int) -> NDArray[np.int64]:
    """Return an int64 array of ``elements`` elements, written with 64 or 32 bits each."""
    if len(data) == 8 * elements:
        return np.frombuffer(data, INT64)
    if len(data) == 4 * elements:
        return np.frombuffer(data, INT32).astype(INT64)
    raise FrameError(f"{len(data)} bytes are not {elements} integers", cure=CURE)


#: The rows of the last valid record, so that equal rows are checked once. One assignment replaces it, so threads need
#: no lock.
_last_rows = _Rows(("", b"", b"", b"", b""), ())
