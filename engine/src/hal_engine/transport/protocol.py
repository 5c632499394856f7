"""Messages between sender and reader besides output frames.

The reader binds (a ROUTER), the senders connect (each a DEALER). So the engine owns the address, and senders and reader
may start, stop and restart in any order. A ZeroMQ message holds one or more frames, one after the other.

=============  ================  ==========================================================================
frame          direction         meaning of its sequence, and its body (a MessagePack map)
=============  ================  ==========================================================================
OUTPUT         sender → reader   its number within the session, from 1, without gaps
STATE          sender → reader   the last number made; :class:`State`. Heartbeat, greeting, and answer to CURSOR
CURSOR         reader → sender   send everything after this number again; :class:`Cursor`
ACKNOWLEDGE    reader → sender   everything up to this number is received, the sender may drop it
BYE            sender → reader   the session ended with this number, everything is acknowledged; :class:`Bye`
REFUSE         reader → sender   the session was declared lost, the reader accepts no more of it
=============  ================  ==========================================================================

A sender sends no output before a reader has sent its CURSOR. It answers with a STATE, which echoes the cursor's token
and gives the oldest number that it still holds; then it sends from there. So the reader can distinguish three cases: a
repeated frame (dropped), a frame lost on the way (it sends its cursor again), and a real loss (reported). A reader
sends its cursor to every session that is new to it, whatever frame of it arrives first. So a restart of either side or
a broken connection needs no other message. Acknowledgements are cumulative and repeated at every heartbeat: losing one
does no harm.

The reader does not limit what arrives, so the sender limits what it sends: frames by its window, and heartbeats by
their answers. A reader answers each STATE with an ACKNOWLEDGE or a CURSOR. A sender that has sent eight without an
answer sends no more until one arrives, or until it has a new connection.

A side skips kinds of frames, and names in a body, that it does not know: a later revision may add both. A change of how
frames travel must be requested in the CURSOR, so that a reader of the older revision gets them unchanged.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from hal_core import FrameError
from hal_core.frames import FrameHeader, FrameKind, read_body, seal

#: Waiting frames are joined to messages of about this many bytes.
MESSAGE_BYTES = 1 << 16


Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class State(msgspec.Struct, omit_defaults=True, gc=False):
    """The frames that a sender holds."""

    oldest: Positive  #: the oldest number still held, or the next one if none is
    capacity: Positive  #: how many frames it holds at most before it makes its caller wait
    echo: Token = 0  #: the token of the cursor that this answers, 0 for none


class Cursor(msgspec.Struct, omit_defaults=True, gc=False):
    """The position where a reader continues. Without ``explicit`` it starts at the oldest frame that is held.

    It is not an acknowledgement: the engine may not have processed all that its reader has received. A reader that is
    ``leaving`` wants no more frames, only the answer. The answer shows that its last acknowledgement has arrived:
    messages in flight may be lost when a connection ends.
    """

    token: Token
    explicit: bool = False
    leaving: bool = False


class Bye(msgspec.Struct, omit_defaults=True, gc=False):
    """The end of a session. ``again``: its worker restarts, so a new session follows."""

    again: bool = False


class Empty(msgspec.Struct, gc=False):
    """The body of frames whose header is complete without one."""


_Control = TypeVar("_Control", State, Cursor, Bye, Empty)
_encoder = msgspec.msgpack.Encoder()
_EMPTY = Empty()


def control(
    kind: FrameKind, sequence: int, *, session: int, sender: int = 0, body: State | Cursor | Bye | Empty = _EMPTY
) -> bytes:
    """Return a control frame."""
    return seal(kind, _encoder.encode(body), session=session, sender=sender, sequence=sequence)


def read_control(header: FrameHeader, frame: memoryview, body_type: type[_Control]) -> _Control:
    """Return the body of a control frame; unknown names are skipped. Raises FrameError."""
    body = read_body(header, frame)
    try:
        return msgspec.msgpack.decode(body, type=body_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"the control frame of kind {header.kind} is unreadable: {error}") from error
