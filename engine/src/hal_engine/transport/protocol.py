"""Messages between a sink and its reader, each a frame of one channel (:mod:`hal_engine.transport.channel`).

The reader listens, and the sinks connect. So the engine owns the address, and sinks and reader may start, stop and
restart in any order. The first byte of a frame names its contents.

===========  ================  =======================================================================================
message      direction         meaning
===========  ================  =======================================================================================
Hello        sink → reader     the first: version, session, and the frames that the sink holds
Acknowledge  reader → sink     everything up to a number is processed, the sink may drop it; the first one of a
                               connection answers Hello: send everything after another number
OUTPUT       sink → reader     a frame of :mod:`hal_core.frames`; numbered from 1 within the session, without gaps
Bye          sink → reader     the session ended with this number, and everything is acknowledged
Bye          reader → sink     nothing more is taken: another version, or a session that was declared lost
===========  ================  =======================================================================================

A connection that ends loses the frames under way. The next one begins with the same two messages, so the sink sends
again from where the reader stopped, and the reader sees what the sink no longer holds. Signs of life are the channel's
beats.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from hal_core import FrameError

from hal_engine.transport.channel import Buffer

VERSION = 2
"""Of these messages. Version 1 went over ZeroMQ (hal 1.1 and before)."""
OUTPUT, CONTROL = b"o", b"c"
"""First bytes: an output frame, or one of these messages as a tagged MessagePack map."""
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class _Control(msgspec.Struct, tag=True, gc=False, omit_defaults=True):
    """A message; its class is its tag. Unknown names are skipped, so that a later version may add some."""


class Hello(_Control):
    """``oldest``: the oldest frame that the sink holds, or the next one if it holds none. ``capacity``: how many it
    holds at most before it makes its caller wait."""

    version: int
    session: int
    sender: Number
    oldest: Positive
    capacity: Positive


class Acknowledge(_Control):
    """Everything up to ``sequence`` is processed. ``after``: in the first one of a connection, where the reader
    continues; 0: at the oldest frame that is held."""

    sequence: Number
    after: Number = 0


class Bye(_Control):
    """The session's end. Of a sink: ``last``, and ``again`` if its worker restarts, so that a new session follows. Of a
    reader: ``why``, in words, for the sink's error."""

    last: Number = 0
    again: bool = False
    why: str = ""


Control: TypeAlias = Hello | Acknowledge | Bye
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Control)


def encode_control(message: Control) -> bytes:
    """Return a message as a frame."""
    return CONTROL + _encoder.encode(message)


def decode_control(body: Buffer) -> Control:
    """Return the message in the frame's bytes after the first. Raises only :class:`FrameError`."""
    try:
        message: Control = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"a message is unreadable: {error}", cure="install one version on both sides") from error
    return message
