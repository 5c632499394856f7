"""Frames: the bytes in which records and the transports' control messages travel.

A frame is a header of 64 bytes, a body, and after large bodies a trailer. Everything is little-endian. The header is
final: later versions of version 1 add to bodies, never to the header.

======  ====  =========================================================================================
offset  type  meaning
======  ====  =========================================================================================
0       4s    magic, ``b"HALf"``
4       u8    version, 1; a reader refuses any other
5       u8    revision, for additions of the writer to bodies; a reader ignores it
6       u16   header length, 64
8       u16   kind, :class:`FrameKind`
10      u16   flags: bit 0 the body's checksum is given, bit 1 a trailer follows; the rest is zero
12      u32   sender, the number of the worker or rank
16      u64   total length in bytes: header, body and trailer
24      u64   session, random for each start of a sender
32      u64   sequence of the frame within its session, counted from 1; control frames: see their kind
40      16s   reserved, zero; a reader ignores it
56      u32   CRC-32 (zlib) of the body if bit 0 of the flags is set, else 0
60      u32   CRC-32 (zlib) of bytes 0 to 59
======  ====  =========================================================================================

A body of up to 65,536 bytes has a checksum. A larger one has a trailer instead, u64 total length and u64 sequence
again, so that a torn frame is noticed without reading all of it.

The body of an output frame is a MessagePack map from short names to values (:class:`hal_core.frames.bodies.Body`);
arrays are binary strings of their bytes. A reader skips unknown names, so a writer may add optional parts. An array of
64-bit integers may be written with 32 bits an element; its length shows which.

Several frames may follow each other in one buffer: :func:`split` separates them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

from hal_core.errors import FrameError, InvalidValue
from hal_core.frames.bodies import CURE, Part, decode_body, encode_body
from hal_core.output.records import OutputRecord

try:  # the same checksum with vector instructions: a tenth of the time for 4 KB, but more for a header
    from zlib_ng.zlib_ng import crc32 as body_crc32
except ImportError:  # no wheel for this platform
    body_crc32 = crc32

Buffer = bytes | bytearray | memoryview  #: types of a buffer with a frame

if sys.byteorder != "little":  # Frames contain the bytes of arrays.
    raise ImportError("hal_core.frames.envelope needs a little-endian machine")

MAGIC, VERSION, REVISION = b"HALf", 1, 0
HEADER = struct.Struct("<4sBBHHHIQQQ16xI")  # all but the header's own checksum
_FIELDS = struct.Struct(HEADER.format + "I")
CHECKSUM, TRAILER = struct.Struct("<I"), struct.Struct("<QQ")
HEADER_LENGTH = HEADER.size + CHECKSUM.size
CHECKED_BODY = 1 << 16  #: bodies of up to so many bytes have a checksum, larger ones a trailer
HAS_CHECKSUM, HAS_TRAILER = 1, 2


class FrameKind(IntEnum):
    """The kind of a frame. Control frames are for transports (``hal_engine.transport.protocol``)."""

    OUTPUT = 1
    STATE = 2  #: sender to reader: the last sequence it made, and the oldest that it still holds
    ACKNOWLEDGE = 3  #: reader to sender: everything up to this sequence is taken
    CURSOR = 4  #: reader to sender: send everything after this sequence
    BYE = 5  #: sender to reader: the session has ended with this sequence
    REFUSE = 6  #: reader to sender: the session was declared lost, its frames are refused
    # 7 to 14 were used by earlier versions: do not reuse them


_OUTPUT = int(FrameKind.OUTPUT)  # reading an enum's member costs a call


class FrameHeader(NamedTuple):
    """The fields of a header that describe the frame."""

    kind: int  #: a :class:`FrameKind`, or the number of a later revision
    flags: int
    sender: int
    session: int
    sequence: int
    total_length: int  #: bytes
    checksum: int  #: of the body


class Frame(NamedTuple):
    """A decoded output frame."""

    header: FrameHeader
    record: OutputRecord


def encode(record: OutputRecord, *, session: int, sender: int, sequence: int) -> bytes:
    """Return the record as one frame. Raises InvalidValue for a number that the header cannot hold."""
    return seal(_OUTPUT, *encode_body(record), session=session, sender=sender, sequence=sequence)


def seal(kind: int, body: Part, *more: Part, session: int, sender: int, sequence: int) -> bytes:
    """Return header, body and, for a large body, trailer as one frame. The body may be given in parts.

    Raises InvalidValue for a number that the header cannot hold.
    """
    size = len(body)
    if more:
        size += sum([len(part) for part in more])
        if size <= CHECKED_BODY:
            body, more = b"".join((body, *more)), ()
    try:
        if size <= CHECKED_BODY:
            total, flags, checksum, tail = HEADER_LENGTH + size, HAS_CHECKSUM, body_crc32(body), b""
        else:
            total, flags, checksum = HEADER_LENGTH + size + TRAILER.size, HAS_TRAILER, 0
            tail = TRAILER.pack(total, sequence)
        head = HEADER.pack(
            MAGIC, VERSION, REVISION, HEADER_LENGTH, kind, flags, sender, total, session, sequence, checksum
        )
    except struct.error as error:
        numbers = f"session {session}, sender {sender}, sequence {sequence}"
        raise InvalidValue(f"the header cannot hold {numbers}: {error}", cure="give whole numbers from 0") from error
    sealed = CHECKSUM.pack(crc32(head))
    return b"".join((head, sealed, body, *more, tail))


def decode(buffer: Buffer) -> Frame:
    """Return the output frame in the buffer, which must contain exactly one. Arrays are read-only views of the buffer.

    Raises only FrameError, for any other bytes. Allocates no more than a small multiple of the buffer.
    """
    view = memoryview(buffer).toreadonly()
    header = read_header(view)
    if header.total_length != len(view):
        raise FrameError(f"the header gives {header.total_length} bytes, but there are {len(view)}", cure=CURE)
    return decode_frame(header, view)


def decode_frame(header: FrameHeader, frame: memoryview) -> Frame:
    """Decode an output frame whose header is already read; ``frame`` is exactly its bytes.

    :raises FrameError: for a frame of another kind, and for an invalid record.
    """
    if header.kind != _OUTPUT:
        raise FrameError(f"a frame of kind {header.kind} carries no record", cure="only output frames do")
    return Frame(header, decode_body(read_body(header, frame)))


def read_header(buffer: memoryview, offset: int = 0) -> FrameHeader:
    """Check and return the header at ``offset``. The body may still be missing. Raises FrameError."""
    body = offset + HEADER_LENGTH
    if len(buffer) < body:
        raise FrameError(f"{len(buffer) - offset} bytes are too few for a header of {HEADER_LENGTH}", cure=CURE)
    magic, version, _, length, kind, flags, sender, total, session, sequence, checksum, own = _FIELDS.unpack_from(
        buffer, offset
    )
    if magic != MAGIC:
        raise FrameError(f"the magic is {magic!r}, not {MAGIC!r}", cure="connect only hal's own senders here")
    if version != VERSION:
        raise FrameError(
            f"the frame has version {version}, but this reader needs {VERSION}", cure="install one version"
        )
    if own != crc32(buffer[offset : body - 4]):
        raise FrameError("the header's checksum is wrong", cure=CURE)
    tail = TRAILER.size if flags & HAS_TRAILER else 0
    if length != HEADER_LENGTH or total < HEADER_LENGTH + tail or flags & ~(HAS_CHECKSUM | HAS_TRAILER):
        raise FrameError(f"the header is invalid: length {length}, total {total}, flags {flags}", cure=CURE)
    return FrameHeader(kind, flags, sender, session, sequence, total, checksum)


def read_body(header: FrameHeader, frame: memoryview) -> memoryview:
    """Check and return the body of the frame, whose bytes are exactly ``frame``. Raises FrameError."""
    end = len(frame)
    if header.flags & HAS_TRAILER:
        end -= TRAILER.size
        if TRAILER.unpack_from(frame, end) != (header.total_length, header.sequence):
            raise FrameError("length and sequence at the end differ from those at the start", cure=CURE)
    elif not header.flags & HAS_CHECKSUM:
        raise FrameError("the frame has neither checksum nor trailer", cure=CURE)
    body = frame[HEADER_LENGTH:end]
    if header.flags & HAS_CHECKSUM and body_crc32(body) != header.checksum:
        raise FrameError("the body's checksum is wrong", cure=CURE)
    return body


def split(buffer: Buffer) -> Iterator[tuple[FrameHeader, memoryview]]:
    """Yield the consecutive frames in the buffer; bodies are not checked yet.

    Raises FrameError if a header is wrong or a frame ends beyond the buffer: later frames cannot be found then.
    """
    view, start = memoryview(buffer).toreadonly(), 0
    while start < len(view):
        header = read_header(view, start)
        end = start + header.total_length
        if end > len(view):
            raise FrameError(f"the frame is truncated: {len(view) - start} of {header.total_length} bytes", cure=CURE)
        yield header, view[start:end]
        start = end
