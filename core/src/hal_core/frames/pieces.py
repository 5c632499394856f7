"""Large output frames in pieces: encoding and decoding go on beside the way of most bytes, not before and after it.

Nine tenths of a large frame are two arrays that nobody computes with on the way: token ids and log-probabilities of the
alternatives. They leave as they are, while the rest is encoded or decoded. Each piece has the frame's sequence:

=========  ==============================================================================================
TOKEN_IDS  a header, and as the message's second part the bytes of ``logprob_token_ids``
LOGPROBS   a header, and as the message's second part the bytes of ``logprobs``
ROWS       a frame: the body of an output frame without these two arrays, but with their lengths (``apart``)
=========  ==============================================================================================

They may come in any order. Of a large frame that comes whole, length and sequence stand at both ends; of one in
pieces, in the headers of the arrays and in ROWS, which has a checksum where its body is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hal_core.errors import FrameError, InvalidValue
from hal_core.frames.bodies import Part, Rows, encode_rows
from hal_core.frames.envelope import (
    CHECKED_BODY,
    HEADER_LENGTH,
    MAGIC,
    Frame,
    FrameHeader,
    FrameKind,
    read_body,
    read_header,
    seal,
    seal_apart,
)
from hal_core.output.records import OutputRecord, narrowed

_OUTPUT, _COMING = int(FrameKind.OUTPUT), int(FrameKind.COMING)  # reading an enum's member costs a call
_TOKEN_IDS, _ROWS, _LOGPROBS = int(FrameKind.TOKEN_IDS), int(FrameKind.ROWS), int(FrameKind.LOGPROBS)
MOST_BYTES = (1 << 32) - 1  #: of one array: MessagePack's bound, for a frame that has to go whole
MOST_AHEAD = 1 << 26  #: bytes of an array that a reader keeps before it has the rows
PIECES = frozenset((_TOKEN_IDS, _ROWS, _LOGPROBS))  #: the kinds


def is_large(record: OutputRecord) -> bool:
    """Whether the record is to travel in pieces: its arrays of alternatives alone, ids narrow, are a large body."""
    ids, logprobs = record.logprob_token_ids, record.logprobs
    return ids is not None and logprobs is not None and 4 * ids.size + logprobs.nbytes > CHECKED_BODY


class Writing:
    """The pieces of one record for which :func:`is_large` holds. Arrays are the record's own, not copied."""

    __slots__ = ("_ids", "_logprobs", "_numbers", "_record", "held", "nbytes")

    def __init__(self, record: OutputRecord, **numbers: int) -> None:
        """``numbers``: session, sender and sequence. Raises InvalidValue for arrays that no frame can hold whole."""
        assert record.logprob_token_ids is not None
        assert record.logprobs is not None
        self._record, self._numbers = record, numbers
        self._ids = narrowed(record.logprob_token_ids).data.cast("B")
        self._logprobs = record.logprobs.data.cast("B")
        self.nbytes = len(self._ids) + len(self._logprobs)  #: of both arrays
        copied = len(self._ids) != record.logprob_token_ids.nbytes
        self.held = self.nbytes + (record.logprob_token_ids.nbytes if copied else 0)  #: bytes, while it is kept
        if max(len(self._ids), len(self._logprobs)) > MOST_BYTES:
            raise InvalidValue(
                f"an array of log-probabilities has more than {MOST_BYTES} bytes",
                cure="ask for fewer alternatives",
                hook="save_output",
                argument="record",
            )

    def token_ids(self) -> tuple[Part, ...]:
        """The message of the ids, in two parts."""
        return seal_apart(_TOKEN_IDS, len(self._ids), **self._numbers), self._ids

    def logprobs(self) -> tuple[Part, ...]:
        """The message of the log-probabilities, in two parts."""
        return seal_apart(_LOGPROBS, len(self._logprobs), **self._numbers), self._logprobs

    def rows(self) -> bytes:
        """The frame with all else. Raises InvalidValue for a record that cannot be encoded."""
        return seal(_ROWS, encode_rows(self._record, len(self._ids), len(self._logprobs)), **self._numbers)


class Reading:
    """The pieces of the frame with that sequence, as they come in."""

    __slots__ = ("_ids", "_length", "_logprobs", "_rows", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self._length = 0  # of ROWS
        self._rows: Rows | None = None
        self._ids: memoryview | None = None  # until the rows have them
        self._logprobs: memoryview | None = None

    def take(self, header: FrameHeader, data: memoryview) -> Frame | None:
        """Take a piece; return the frame once it is whole. ``data`` is the frame of ROWS, else what a header is about.

        The frame's arrays are read-only views of what it was given. Raises FrameError for what is unsound.
        """
        kind = header.kind
        if kind == _ROWS:
            self._rows, self._length = Rows(read_body(header, data)), header.total_length
        elif kind == _TOKEN_IDS:
            self._ids = self._believed(data)
        elif kind == _LOGPROBS:
            self._logprobs = self._believed(data)
        else:
            raise FrameError(f"a frame of kind {kind} is no piece", cure="it is asked for again")
        if (rows := self._rows) is None:
            return None
        if self._ids is not None:
            rows.add_ids(self._ids)
            self._ids = None
        if self._logprobs is None or not rows.has_ids:
            return None
        fields: Any = (_OUTPUT, 0, header.sender, header.session, header.sequence, self._length + sum(rows.apart), 0)
        return Frame(FrameHeader(*fields), rows.add_logprobs(self._logprobs))

    def _believed(self, data: memoryview) -> memoryview:
        """The array, if the rows have told of it or it is of a size that is kept without them."""
        if self._rows is None and len(data) > MOST_AHEAD:
            raise FrameError(f"an array of {len(data)} bytes came before its rows", cure="it is asked for again, whole")
        return data


def apart(message: memoryview, beside: memoryview) -> Iterator[tuple[FrameHeader, memoryview]]:
    """As :func:`hal_core.frames.envelope.split`, of a message that is a header and what is ``beside`` it, an array."""
    header = read_header(message)
    if not len(message) == HEADER_LENGTH == header.total_length - len(beside):
        raise FrameError(
            f"{header.total_length} bytes came as {len(message)} and {len(beside)}", cure="send frames whole"
        )
    yield header, beside.toreadonly()


def is_word_ahead(message: memoryview) -> bool:
    """Whether the message says no more than that something is COMING: to have heard it is all there is to do."""
    return len(message) == HEADER_LENGTH and message[8] == _COMING and message[:4] == MAGIC
