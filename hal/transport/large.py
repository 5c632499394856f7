"""Frames with many log-probabilities on their way to the reader.

Through the socket they go in pieces (:mod:`hal_core.frames.pieces`), of which the first leaves before the second is
encoded; into shared memory as a whole. A word, COMING, goes ahead: the reader, and a thread of ZeroMQ on either side,
are asleep until something comes, and wake up while the frame is being made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypedDict

from hal_core import OutputRecord
from hal_core.frames import Part, Writing, decode, encode

Message = tuple[Part, ...]
Send = Callable[[Message], bool]  #: whether the transport has taken the message, given in its parts


class Numbers(TypedDict):
    """What the header of every frame says of it."""

    session: int
    sender: int
    sequence: int


class Parts:
    """Bytes in parts that follow each other, put together where they are to go."""

    __slots__ = ("_length", "_parts")

    def __init__(self, parts: Message) -> None:
        self._parts, self._length = parts, sum([len(part) for part in parts])

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def write_to(self, target: memoryview) -> None:
        """Write them into ``target``, which has at least their length in bytes."""
        at = 0
        for part in self._parts:
            end = at + len(part)
            target[at:end] = part
            at = end


class LargeFrame(Protocol):
    """A frame that goes by itself, and how far it has gone."""

    def __len__(self) -> int:
        """Bytes that are held, for the window to count."""

    def __bytes__(self) -> bytes:
        """The frame as a whole."""

    def deliveries(self) -> list[tuple[str, int, int]]:
        """See :meth:`hal_core.output.records.OutputRecord.deliveries`."""

    def send(self, send: Send) -> bool:
        """Hand over what is still due. Return whether that is all with the transport."""

    def restart(self) -> None:
        """It may be asked for again: what has gone does not count."""


class InPieces:
    """A large frame for the socket: in pieces, but whole once it is asked for again.

    Of a record for which :func:`hal_core.frames.pieces.is_large` holds.
    """

    def __init__(self, record: OutputRecord, numbers: Numbers) -> None:
        self._record, self._numbers = record, numbers
        self._pieces = pieces = Writing(record, **numbers)
        self._due: list[Callable[[], Message]] = [pieces.token_ids, self._encoded, pieces.logprobs]
        self._rows: Message = ()
        self._whole = b""  # while it waits for room in the transport
        self._begun = False

    def __len__(self) -> int:
        return sum([len(part) for part in self._rows]) + self._pieces.held

    def __bytes__(self) -> bytes:
        return encode(self._record, **self._numbers)

    def deliveries(self) -> list[tuple[str, int, int]]:
        """See :class:`LargeFrame`."""
        return self._record.deliveries()

    def begin(self, send: Send) -> None:
        """Have the ids leave, if there is room: they need no encoding."""
        self._hand_over(send)

    def encode(self) -> None:
        """Encode what has to be. Raises InvalidValue for a record that cannot be encoded."""
        self._rows = (self._pieces.rows(),)

    def send(self, send: Send) -> bool:
        """See :class:`LargeFrame`."""
        while self._due:
            if not self._hand_over(send):
                return False
        self._whole = b""
        return True

    def restart(self) -> None:
        """See :class:`LargeFrame`."""
        if self._begun:
            self.keep_whole()

    def keep_whole(self) -> None:
        """It is not to go in pieces."""
        self._due = [self._in_one]

    def _hand_over(self, send: Send) -> bool:
        if not send(self._due[0]()):
            return False
        self._begun = True
        del self._due[0]
        return True

    def _encoded(self) -> Message:
        return self._rows

    def _in_one(self) -> Message:
        self._whole = self._whole or bytes(self)
        return (self._whole,)


class InMemory:
    """A large frame for shared memory: it is offered there once, and goes through the socket, whole, if that fails."""

    def __init__(self, parts: Parts, lay: Callable[[Parts], bytes | None]) -> None:
        """``lay`` returns the word to send about the parts once they lie there, None if there was no room."""
        self._parts = parts
        self._lay: Callable[[Parts], bytes | None] | None = lay
        self._message = b""  # while it waits for room in the transport

    def __len__(self) -> int:
        return len(self._parts)

    def __bytes__(self) -> bytes:
        return bytes(self._parts)

    def deliveries(self) -> list[tuple[str, int, int]]:
        """See :class:`LargeFrame`."""
        return decode(bytes(self)).record.deliveries()

    def send(self, send: Send) -> bool:
        """See :class:`LargeFrame`."""
        if not self._message:
            lay, self._lay = self._lay, None
            self._message = (lay(self._parts) if lay is not None else None) or bytes(self)
        if not send((self._message,)):
            return False
        self._message = b""
        return True

    def restart(self) -> None:
        """See :class:`LargeFrame`. What waits to be sent about it is not true any more."""
        self._message = b""
