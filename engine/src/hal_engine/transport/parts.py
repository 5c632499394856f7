"""Messages over connections with keys: sent in parts, so that a peer without a key cannot fill memory.

libzmq's limit on the size of a message (``ZMQ_MAXMSGSIZE``) applies to each part, and to each command of the handshake
too. libzmq ends a connection that announces more, before it allocates memory. So a large message is sent as parts of
:data:`PART_BYTES`. A peer that has not yet shown its key then makes this process hold at most one such part.
"""

from __future__ import annotations

import zmq

#: Bytes of a part. Waiting frames are joined to messages of this size, which fit one part.
PART_BYTES = 1 << 16
_SEALED_BYTES = 33  #: what CURVE adds to each part: its command's name, a flag, a nonce and the authentication tag


def limit_parts(socket: zmq.Socket[bytes]) -> None:
    """Let the socket end connections that announce larger parts. It has keys, and is not yet bound or connected."""
    socket.maxmsgsize = PART_BYTES + _SEALED_BYTES


def parts_of(message: bytes) -> list[bytes | memoryview]:
    """Return the parts to send for the message over a connection with keys."""
    if len(message) <= PART_BYTES:
        return [message]
    view = memoryview(message)
    return [view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)]


def joined(parts: list[zmq.Frame]) -> memoryview:
    """Return the message whose parts these are."""
    return parts[0].buffer if len(parts) == 1 else memoryview(b"".join(part.buffer for part in parts))
