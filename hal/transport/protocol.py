"""What sender and reader say to each other besides output frames.

The reader binds (a ROUTER), the senders connect (each a DEALER), so the engine owns the address and senders and
reader may start, stop and restart in any order. A ZeroMQ message holds one or more frames, one after the other.

=============  ================  ==========================================================================
frame          direction         meaning of its sequence, and its body (a MessagePack map)
=============  ================  ==========================================================================
OUTPUT         sender → reader   its number within the session, from 1, without holes
STATE          sender → reader   the last number made; :class:`State`. Heartbeat, greeting, and answer to CURSOR
CURSOR         reader → sender   send everything after this number again; :class:`Cursor`
ACKNOWLEDGE    reader → sender   everything up to this number is taken, the sender may forget it
BYE            sender → reader   the session ended with this number, everything is acknowledged; :class:`Bye`
REFUSE         reader → sender   the session was declared lost, nothing more of it is taken
=============  ================  ==========================================================================

A sender sends no output before a reader has given its CURSOR. It answers with a STATE that echoes the cursor's token
and says which number is the oldest that it still holds, then sends on from there: so the reader knows what is a
repetition (dropped), a hole on the way (it gives its cursor again) and a real gap (reported). A reader gives its cursor
to every session it does not know, whatever frame it hears of it first; so after a restart of either side, or a broken
connection, nothing else is needed. Acknowledgements are cumulative and repeated at every heartbeat: losing one does no
harm.

Nothing stops what comes in at the reader, so what a sender sends is bounded here: frames by its window, and
heartbeats by their answers. A reader answers each STATE with an ACKNOWLEDGE or a CURSOR; a sender that has sent eight
and heard nothing sends no more until it does, or until its connection is a new one.

Kinds that a side does not know are skipped, and so are names in a body: a later revision may add both. What changes how
frames travel has to be asked for in the CURSOR, so that a reader that knows nothing of it gets them whole.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from hal_core import FrameError
from hal_core.frames import FrameHeader, FrameKind, read_body, seal

#: Frames that wait together are joined to messages of about this many bytes.
MESSAGE_BYTES = 1 << 16


Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class State(msgspec.Struct, omit_defaults=True, gc=False):
    """What a sender holds."""

    oldest: Positive  #: the oldest number still held, or the next one if none is
    capacity: Positive  #: how many frames it holds at most before it makes its caller wait
    echo: Token = 0  #: the token of the cursor that this answers, 0 for none


class Cursor(msgspec.Struct, omit_defaults=True, gc=False):
    """Where a reader wants to go on. Without ``explicit`` it takes the oldest frame there is.

    It acknowledges nothing: what a reader has received its engine may not have dealt with yet. A reader that is
    ``leaving`` wants no more frames, only the answer, because it shows that its last acknowledgement has arrived: what
    is on its way when a connection ends may be lost.
    """

    token: Token
    explicit: bool = False
    leaving: bool = False


class Bye(msgspec.Struct, omit_defaults=True, gc=False):
    """The end of a session. ``again``: its worker is started again, so a new session follows."""

    again: bool = False


class Empty(msgspec.Struct, gc=False):
    """The body of frames whose header says everything."""


_Control = TypeVar("_Control", State, Cursor, Bye, Empty)
_encoder = msgspec.msgpack.Encoder()
_EMPTY = Empty()


def control(
    kind: FrameKind, sequence: int, *, session: int, sender: int = 0, body: State | Cursor | Bye | Empty = _EMPTY
) -> bytes:
    """Return a control frame."""
    return seal(kind, _encoder.encode(body), session=session, sender=sender, sequence=sequence)


def read_control(header: FrameHeader, frame: memoryview, body_type: type[_Control]) -> _Control:
    """Return the body of a control frame, unknown names skipped. Raises FrameError."""
    body = read_body(header, frame)
    try:
        return msgspec.msgpack.decode(body, type=body_type)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"the control frame of kind {header.kind} is unreadable: {error}") from error
