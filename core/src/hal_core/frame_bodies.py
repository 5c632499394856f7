"""The body of an output frame: a record as a MessagePack map (``hal_core.frames`` says what lies around it).

Arrays are written as their bytes, without a loop over tokens; what is missing is left out. A reader skips names that
it does not know, so a later revision may add optional parts.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hal_core.errors import FrameError, InvalidValue
from hal_core.records import BOOL, FLOAT32, INT32, INT64, UINT8, OutputRecord, assemble, join_request_ids

MAX_COLUMNS = 1 << 20  #: most log-probability columns a reader believes


class Body(msgspec.Struct, omit_defaults=True, gc=False):
    """The body of an output frame. Names are short because every frame carries them."""

    step: int
    rows: int
    ids: str  #: request ids joined by NUL characters
    status: memoryview
    finish: memoryview
    pos: memoryview
    counts: memoryview
    tokens: memoryview
    first: memoryview
    dcounts: memoryview | None = None
    drafts: memoryview | None = None
    columns: int = 0  #: K+1, 0 without log-probabilities
    lids: memoryview | None = None
    lps: memoryview | None = None
    ranks: memoryview | None = None
    msgs: dict[int, str] | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Body)
#: What decoding unsound bytes may raise, apart from FrameError
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)
_CURE = "have it sent again; if that does not help, sender and reader differ in version"


def encode_body(record: OutputRecord) -> bytes:
    """Return the record as the body of a frame."""
    try:
        return _encoder.encode(_body_of(record))
    except (UnicodeEncodeError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"the record cannot be encoded: {error}", hook="save_output", argument="record") from error


def decode_body(data: memoryview) -> OutputRecord:
    """Return the record that the body holds; its arrays are views of the body. Raises FrameError and nothing else."""
    try:
        return _record_of(_decoder.decode(data))
    except FrameError:
        raise
    except _UNREADABLE as error:
        raise FrameError(f"the body is no record: {error}", cure=_CURE) from error


def _body_of(record: OutputRecord) -> Body:
    body = Body(
        record.step,
        len(record.request_ids),
        join_request_ids(record.request_ids),
        record.status.data,
        record.finish.data,
        record.positions.data,
        record.counts.data,
        record.tokens.data,
        record.first_token.data,
    )
    if record.draft_counts is not None and record.drafts is not None:
        body.dcounts, body.drafts = record.draft_counts.data, record.drafts.data
    if record.logprob_token_ids is not None and record.logprobs is not None:
        body.columns, body.lps = record.logprobs.shape[1], record.logprobs.data
        body.lids = _narrowed(record.logprob_token_ids).data
        body.ranks = None if record.ranks is None else record.ranks.data
    if record.messages:
        body.msgs = dict(record.messages)
    return body


def _narrowed(values: NDArray[np.int64]) -> NDArray[Any]:
    """The values with 32 bits each if they fit: token ids do, and half of a large frame is token ids."""
    narrow = values.astype(INT32)
    return narrow if np.array_equal(narrow, values) else values


#: The ids of the last frame, joined and apart: a batch often keeps its requests from step to step.
_last_split: tuple[str, tuple[str, ...]] = ("", ())


def _split_ids(joined: str, rows: int) -> tuple[str, ...]:
    global _last_split
    last, request_ids = _last_split
    if joined != last:
        request_ids = tuple(joined.split("\0")) if joined else ()
        _last_split = (joined, request_ids)
    if len(request_ids) != rows:
        raise FrameError(f"{len(request_ids)} request ids for {rows} rows", cure=_CURE)
    return request_ids


def _record_of(body: Body) -> OutputRecord:
    rows, columns = body.rows, body.columns
    if not 0 <= columns <= MAX_COLUMNS or not (
        rows == body.status.nbytes == body.finish.nbytes == body.first.nbytes and body.counts.nbytes == 4 * rows
    ):
        raise FrameError(f"the arrays do not have {rows} rows, or {columns} columns are too many", cure=_CURE)
    counts = np.frombuffer(body.counts, INT32)
    tokens = _wide(body.tokens, _total(counts))
    drafts = draft_counts = token_ids = logprobs = ranks = None
    if (body.dcounts is None) != (body.drafts is None) or len(
        {bool(columns), body.lids is not None, body.lps is not None}
    ) > 1:
        raise FrameError("of parts that belong together only some are there", cure=_CURE)
    if body.dcounts is not None and body.drafts is not None:
        draft_counts = _sized(body.dcounts, INT32, rows)
        drafts = _wide(body.drafts, _total(draft_counts))
    if body.lids is not None and body.lps is not None:
        shape = (len(tokens), columns)
        token_ids = _wide(body.lids, len(tokens) * columns).reshape(shape)
        logprobs = _sized(body.lps, FLOAT32, len(tokens) * columns).reshape(shape)
        ranks = None if body.ranks is None else _sized(body.ranks, INT32, len(tokens))
    return assemble(
        body.step,
        _split_ids(body.ids, rows),
        np.frombuffer(body.status, UINT8),
        np.frombuffer(body.finish, UINT8),
        _wide(body.pos, rows),
        counts,
        tokens,
        _flags(body.first),
        draft_counts,
        drafts,
        token_ids,
        logprobs,
        ranks,
        body.msgs or {},
    )


def _total(counts: NDArray[np.int32]) -> int:
    """The sum; the plain case, one token a row, is known without adding up."""
    rows = len(counts)
    return rows if counts.tobytes() == b"\1\0\0\0" * rows else int(np.add.reduce(counts, dtype=INT64))


def _sized(data: memoryview, dtype: np.dtype[Any], elements: int) -> NDArray[Any]:
    if data.nbytes != dtype.itemsize * elements:
        raise FrameError(f"{data.nbytes} bytes are not {elements} of {dtype}", cure=_CURE)
    return np.frombuffer(data, dtype)


def _wide(data: memoryview, elements: int) -> NDArray[np.int64]:
    """An int64 array of so many elements, written with 64 or 32 bits each."""
    if data.nbytes == 8 * elements:
        return np.frombuffer(data, INT64)
    if data.nbytes == 4 * elements:
        return np.frombuffer(data, INT32).astype(INT64)
    raise FrameError(f"{data.nbytes} bytes are not {elements} integers", cure=_CURE)


def _flags(data: memoryview) -> NDArray[np.bool_]:
    """A bool array; any byte but 0 and 1 would be a bool that NumPy computes wrongly with."""
    if bytes(data).translate(None, b"\0\1"):
        raise FrameError("a flag is neither 0 nor 1", cure=_CURE)
    return np.frombuffer(data, BOOL)
