"""What two transfers say to each other: frames of kind ``BLOCKS``, whose body has a checksum of its own at any size.

The body is u32 length and u32 CRC-32 of a MessagePack array, the array, and behind it the bytes of blocks.

sender                                     receiver
Blocks   (contents, CRC-32 of each) ─────>
Seal     (that was all)             ─────>
Withdraw (given up)                 ─────>
Beat     (waiting for an answer)    ─────>
         <─────────────────────────────────  Alive  (how far it has taken), Answer (how a key has ended), Gone

What the sender says is numbered: ``epoch`` rises whenever it says everything again from the beginning, as after a
broken connection, and the frame's sequence counts from 1 in each. Who misses a number takes nothing more until the next
epoch, and asks for it. So nothing that was lost on the way goes unnoticed, and what comes twice is known.
"""

from __future__ import annotations

import struct
from typing import TypeAlias
from zlib import crc32

import msgspec

from hal_core.errors import FrameError
from hal_core.frames.envelope import Buffer, FrameKind, read_body, seal, split
from hal_core.handover.protocol import HandoverKey

try:  # the same checksum by vector instructions
    from zlib_ng.zlib_ng import crc32 as block_crc32
except ImportError:  # a platform it has no wheel for
    block_crc32 = crc32

_HEAD = struct.Struct("<II")


class _Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    """``to``: the session that it is meant for."""

    to: int


class _Numbered(_Message, gc=False):
    epoch: int


class Blocks(_Numbered, gc=False):
    """Contents of number ``first`` and on of the blocks promised. ``facts``: digest of the sender's fingerprint."""

    request_id: str
    attempt: int
    first: int
    facts: bytes
    crcs: list[int]


class Seal(_Numbered, gc=False):
    """All was sent. ``digest``: of the blocks' checksums and of what the seal says."""

    request_id: str
    attempt: int
    blocks: int
    tokens: int
    first_token: int
    drafts: list[int]
    state: bytes
    digest: bytes


class Withdraw(_Numbered, gc=False):
    """The sender has given the key up."""

    request_id: str
    attempt: int


class Beat(_Numbered, gc=False):
    """The sender is there, and waits for answers to these keys."""

    waiting: list[tuple[str, int]]


class Alive(_Message, gc=False):
    """The receiver is there: of this epoch it has taken everything up to ``number``, ``nbytes`` in all.

    ``again``: it misses something and wants everything again.
    """

    epoch: int
    number: int
    nbytes: int
    again: bool


class Answer(_Message, gc=False):
    """How a key has ended at the receiver: ``arrived``, ``rejected`` or ``cancelled``, and why."""

    request_id: str
    attempt: int
    outcome: str
    why: str


class Gone(_Message, gc=False):
    """The session ``meant`` is not here any more."""

    meant: int


Message: TypeAlias = Blocks | Seal | Withdraw | Beat | Alive | Answer | Gone
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def key_of(message: Blocks | Seal | Withdraw | Answer) -> HandoverKey:
    """Whose it is."""
    return HandoverKey(message.request_id, message.attempt)


def crc_of(block: Buffer) -> int:
    """CRC-32 of a block's bytes."""
    return int(block_crc32(block))


def pack(message: Message, data: Buffer = b"", *, session: int, number: int = 0) -> bytes:
    """The message as a frame, ``data`` behind it."""
    told = _encoder.encode(message)
    head = _HEAD.pack(len(told), crc32(told))
    return seal(FrameKind.BLOCKS, head + told, memoryview(data), session=session, sender=0, sequence=number)


def unpack(buffer: Buffer) -> tuple[int, int, Message, memoryview]:
    """Session and number of a frame, its message and the data behind it. Raises FrameError and nothing else."""
    frames = list(split(buffer))
    if len(frames) != 1 or frames[0][0].kind != FrameKind.BLOCKS:
        raise FrameError("not one frame of blocks")
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
