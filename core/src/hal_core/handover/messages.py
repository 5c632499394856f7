"""Messages between two transfers: frames of kind ``BLOCKS``, whose body has its own checksum at any size.

The body is u32 length and u32 CRC-32 of a MessagePack array, the array, and then the bytes of the blocks.

    sender                                     receiver
    Blocks   (contents, CRC-32 of each) ─────>
    Seal     (all blocks were sent)     ─────>
    Withdraw (key cancelled)            ─────>
    Beat     (waiting for an answer)    ─────>
             <─────────────────────────────────  Alive  (how far it has received), Answer (how a key ended), Gone

The sender numbers its messages. ``epoch`` rises whenever it sends everything again from the beginning, as after a
broken connection; the frame's sequence counts from 1 in each epoch. If a receiver misses a number, it takes no message
until the next epoch, and requests that epoch. So every lost message is detected, and every duplicate is recognized.
"""

from __future__ import annotations

import struct
from typing import TypeAlias
from zlib import crc32

import msgspec

from hal_core.errors import FrameError
from hal_core.frames.envelope import Buffer, FrameKind, read_body, seal, split
from hal_core.handover.protocol import HandoverKey

try:  # the same checksum with vector instructions
    from zlib_ng.zlib_ng import crc32 as block_crc32
except ImportError:  # no wheel for this platform
    block_crc32 = crc32

_HEAD = struct.Struct("<II")


class _Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """``to``: the session addressed."""

    to: int


class _Numbered(_Message, gc=False):
    epoch: int


class Blocks(_Numbered, gc=False):
    """Contents of the promised blocks from number ``first``. ``facts``: digest of the sender's fingerprint."""

    request_id: str
    attempt: int
    first: int
    facts: bytes
    crcs: list[int]


class Seal(_Numbered, gc=False):
    """All blocks were sent. ``digest``: of the blocks' checksums and of the seal's fields."""

    request_id: str
    attempt: int
    blocks: int
    tokens: int
    first_token: int
    drafts: list[int]
    state: bytes
    digest: bytes


class Withdraw(_Numbered, gc=False):
    """The sender has cancelled the key."""

    request_id: str
    attempt: int


class Beat(_Numbered, gc=False):
    """Heartbeat of a sender that waits for answers to these keys."""

    waiting: list[tuple[str, int]]


class Alive(_Message, gc=False):
    """Heartbeat of the receiver: in this epoch it has taken all messages up to ``number``, ``nbytes`` in all.

    ``again``: it has missed a message and requests all of them again.
    """

    epoch: int
    number: int
    nbytes: int
    again: bool


class Answer(_Message, gc=False):
    """How a key ended at the receiver: ``arrived``, ``rejected`` or ``cancelled``, and why."""

    request_id: str
    attempt: int
    outcome: str
    why: str


class Gone(_Message, gc=False):
    """The session ``meant`` no longer exists here."""

    meant: int


Message: TypeAlias = Blocks | Seal | Withdraw | Beat | Alive | Answer | Gone
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def key_of(message: Blocks | Seal | Withdraw | Answer) -> HandoverKey:
    """Return the key of a message."""
    return HandoverKey(message.request_id, message.attempt)


def crc_of(block: Buffer) -> int:
    """Return the CRC-32 of a block's bytes."""
    return int(block_crc32(block))


def pack(message: Message, data: Buffer = b"", *, session: int, number: int = 0) -> bytes:
    """Return the message as a frame, followed by ``data``."""
    told = _encoder.encode(message)
    head = _HEAD.pack(len(told), crc32(told))
    return seal(FrameKind.BLOCKS, head + told, memoryview(data), session=session, sender=0, sequence=number)


def unpack(buffer: Buffer) -> tuple[int, int, Message, memoryview]:
    """Return a frame's session and number, its message and the data after it. Raises only FrameError."""
    frames = list(split(buffer))
    if len(frames) != 1 or frames[0][0].kind != FrameKind.BLOCKS:
        raise FrameError("not a single frame of kind BLOCKS")
    header, frame = frames[0]
    body = read_body(header, frame)
    if len(body) < _HEAD.size:
        raise FrameError("too short")
    length, checksum = _HEAD.unpack_from(body)
    told = body[_HEAD.size : _HEAD.size + length]
    if len(told) != length or crc32(told) != checksum:
        raise FrameError("the message's checksum is wrong")
    try:
        return header.session, header.sequence, _decoder.decode(told), body[_HEAD.size + length :]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"the message is unreadable: {error}", cure="install one version on all hosts") from error
