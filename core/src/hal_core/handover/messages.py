"""Messages between two transfers: u32 length of a MessagePack array, the array, and then the bytes of the blocks.

    sender                                     receiver
    Blocks   (contents, CRC-32 of each) ─────>
    Seal     (all blocks were sent)     ─────>
    End      (key cancelled)            ─────>
             <─────────────────────────────────  End (how a key ended)

The wire (:mod:`hal_core.handover.wire`) keeps their order and loses none, or reports the peer as lost.
"""

from __future__ import annotations

import struct
from typing import TypeAlias
from zlib import crc32

import msgspec

from hal_core.errors import FrameError
from hal_core.frames.envelope import Buffer
from hal_core.handover.protocol import HandoverKey

try:  # the same checksum with vector instructions
    from zlib_ng.zlib_ng import crc32 as block_crc32
except ImportError:  # no wheel for this platform
    block_crc32 = crc32

_HEAD = struct.Struct("<I")


class _Message(msgspec.Struct, tag=True, array_like=True, gc=False):
    request_id: str
    attempt: int


class Blocks(_Message, gc=False):
    """Contents of the promised blocks from number ``first``. ``facts_digest``: digest of the sender's fingerprint."""

    first: int
    facts_digest: bytes
    crcs: list[int]


class Seal(_Message, gc=False):
    """All blocks were sent. ``digest``: of the blocks' checksums and of the seal's fields."""

    blocks: int
    tokens: int
    first_token: int
    drafts: list[int]
    state: bytes
    digest: bytes


class End(_Message, gc=False):
    """How a key ended at the receiver: ``arrived``, ``rejected`` or ``cancelled``, and why. A sender's says that it has
    cancelled the key."""

    outcome: str
    why: str


Message: TypeAlias = Blocks | Seal | End
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)


def key_of(message: Message) -> HandoverKey:
    """Return the key of a message."""
    return HandoverKey(message.request_id, message.attempt)


def crc_of(block: Buffer) -> int:
    """Return the CRC-32 of a block's bytes."""
    return int(block_crc32(block))


def pack(message: Message, data: Buffer = b"") -> tuple[Buffer, Buffer]:
    """Return the message and the ``data`` that follows it, as the two parts of one frame."""
    encoded = _encoder.encode(message)
    return _HEAD.pack(len(encoded)) + encoded, data


def unpack(frame: Buffer) -> tuple[Message, memoryview]:
    """Return the message of a frame and the data after it. Raises only FrameError."""
    view = memoryview(frame)
    if len(view) < _HEAD.size:
        raise FrameError(f"{len(view)} bytes are too few for a message", cure="install one version on all hosts")
    end = _HEAD.size + _HEAD.unpack_from(view)[0]
    try:
        return _decoder.decode(view[_HEAD.size : end]), view[end:]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"the message is unreadable: {error}", cure="install one version on all hosts") from error
