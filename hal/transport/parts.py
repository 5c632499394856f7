"""Messages over connections with keys: in parts, so that a peer without a key cannot fill memory.

libzmq's limit for the size of a message (``ZMQ_MAXMSGSIZE``) holds for each part of it, and for each command of the
handshake too: libzmq ends a connection that announces more, before it takes memory. So a large message is sent as parts
of :data:`PART_BYTES`, and a peer that has not shown its key yet makes this process hold one such part at most.
"""

from __future__ import annotations

import zmq

#: Bytes of a part. Frames that wait together are joined to messages of as many, which stay in one part.
PART_BYTES = 1 << 16
_SEALED_BYTES = 33  #: what CURVE adds to each part: its command's name, a flag, a nonce and the seal


def limit_parts(socket: zmq.Socket[bytes]) -> None:
    """Have the socket, which has keys and is not yet bound or connected, end connections that announce larger parts."""
    socket.maxmsgsize = PART_BYTES + _SEALED_BYTES


def parts_of(message: bytes) -> list[bytes | memoryview]:
    """Return what to send in place of the message, where there are keys."""
    if len(message) <= PART_BYTES:
        return [message]
    view = memoryview(message)
    return [view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)]


def joined(parts: list[zmq.Frame]) -> memoryview:
    """Return the message that came as these parts."""
    return parts[0].buffer if len(parts) == 1 else memoryview(b"".join(part.buffer for part in parts))
