"""The sink's end of the wire: its socket, and the memory that it may share with the reader. Its thread's alone.

What is to be sent is kept by the sink's window; here is how it goes: small frames joined, large ones in pieces.
"""

from __future__ import annotations

import zmq
from hal_core import OutputRecord
from hal_core.frames import CHECKED_BODY, HEADER_LENGTH, FrameKind, encode, encode_parts, is_large, seal_apart

from hal.transport.connection import Connection
from hal.transport.large import InMemory, InPieces, LargeFrame, Message, Numbers, Parts
from hal.transport.protocol import Cursor
from hal.transport.shared_memory import SharedSender
from hal.transport.urls import socket_of
from hal.transport.window import Window

#: From this size on ZeroMQ sends from the bytes themselves instead of copying them; frames and records never change.
_NO_COPY_BYTES = 1 << 16
_DONTWAIT, _DONTWAIT_MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)  # enums cost a call


class Wire:
    """One connection, for the frames of one session, which ``window`` holds."""

    def __init__(self, url: str, session: int, sender: int, window: Window, most: int, connection: Connection) -> None:
        """``most``: bytes of shared memory, where the url asks for it."""
        self._connection = connection
        self._session, self._sender, self._window = session, sender, window
        self._coming = seal_apart(FrameKind.COMING, 0, session=session, sender=sender, sequence=0)
        self._takes_pieces = False
        path = socket_of(url)
        shared = path is not None and url.startswith("shm:")
        self.memory = SharedSender(path, session, most) if path is not None and shared else None

    def follow(self, cursor: Cursor) -> None:
        """Send as the reader that gave this cursor can take it."""
        self._takes_pieces = cursor.pieces
        if self.memory is not None:
            self.memory.follow(cursor.shared)

    def encode(self, record: OutputRecord, *, way_is_free: bool) -> bytes | LargeFrame:
        """Return the record as the window's next frame, which begins to leave meanwhile where nothing else has to.

        Raises InvalidValue for a record that cannot be encoded.
        """
        large = record.logprobs is not None and is_large(record)
        if not large and self.memory is None:
            return encode(record, session=self._session, sender=self._sender, sequence=self._window.next)
        ahead = large and way_is_free and self._takes_pieces and self._send_parts((self._coming,))
        numbers: Numbers = {"session": self._session, "sender": self._sender, "sequence": self._window.next}
        if self.memory is not None:
            parts = Parts(encode_parts(record, **numbers))
            return InMemory(parts, self._lay) if len(parts) > HEADER_LENGTH + CHECKED_BODY else bytes(parts)
        frame = InPieces(record, numbers)
        if ahead:
            frame.begin(self._send_parts)
        frame.encode()
        return frame

    def send(self, message: bytes | LargeFrame) -> bool:
        """Send a message, or what is due of a large frame. False: no connection, or the reader does not keep up."""
        if isinstance(message, bytes):
            return self._send_parts((message,))
        if isinstance(message, InPieces) and not self._takes_pieces:
            message.keep_whole()
        return message.send(self._send_parts)

    def close_memory(self) -> None:
        """Give shared memory back. What the reader has not taken out yet is gone for it, and comes as bytes."""
        if self.memory is not None:
            self.memory.close()

    def _send_parts(self, parts: Message) -> bool:
        last, connection = parts[-1], self._connection
        if not connection.is_open:
            return False
        try:
            for part in parts[:-1]:
                connection.socket.send(part, _DONTWAIT_MORE)
            connection.socket.send(last, _DONTWAIT, copy=len(last) < _NO_COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def _lay(self, frame: Parts) -> bytes | None:
        """Lay the frame to send next into shared memory and return the word about it; None without room."""
        window = self._window
        if self.memory is None or not self.memory.offer(frame, window.unsent, window.first):
            return None
        return seal_apart(FrameKind.SHARED, 0, session=self._session, sender=self._sender, sequence=window.unsent)
