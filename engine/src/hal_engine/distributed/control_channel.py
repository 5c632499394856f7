"""Control channel between engine and ranks: control messages, steps and records, each a frame of one channel
(:mod:`hal_engine.transport.channel`).

The engine listens, each rank connects, and its first message has its number. The order is kept, and nothing is
repeated: a connection that has ended is a lost rank, or a lost engine. The first byte of a frame names its contents.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from hal_core import FrameError, GroupLost, OutputRecord
from hal_core.frames import decode, encode, new_session

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.beats import Beats
from hal_engine.transport.channel import CLOSED, Channel, connect
from hal_engine.transport.hub import Hub
from hal_engine.transport.urls import socket_of

from .control_messages import Agreed, Hello, Message, Stop, decode_message, encode_message
from .steps import StepOrder, decode_step, encode_step

if TYPE_CHECKING:
    from hal_engine.transport.channel import Buffer
    from hal_engine.transport.curve import CurveKeys

Contents: TypeAlias = "Message | StepOrder | OutputRecord"
_MESSAGE, _STEP, _RECORD = b"m", b"s", b"r"


def decode_contents(frame: memoryview) -> Contents:
    """Return what a frame holds. Raises only :class:`FrameError`."""
    kind, body = bytes(frame[:1]), frame[1:]
    if kind == _MESSAGE:
        return decode_message(body)
    if kind == _STEP:
        return decode_step(body)
    if kind == _RECORD:
        return decode(body).record
    raise FrameError(f"a frame of kind {kind!r}", cure="install one version on all hosts")


class ControlEnd:
    """One end of a channel with contents. One thread receives; any thread may send."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self._session, self._records = channel, new_session(), 0

    def send(self, message: Message, wait: float = 0.0) -> bool:
        """Send a message. See :meth:`Channel.send`."""
        return self.channel.send(_MESSAGE, encode_message(message), wait=wait)

    def send_record(self, record: OutputRecord, wait: float = 0.0) -> bool:
        """Send a record, as :meth:`send` does. One thread sends all of them."""
        self._records += 1
        frame = encode(record, session=self._session, sender=0, sequence=self._records)
        return self.channel.send(_RECORD, frame, wait=wait)

    def receive(self) -> list[Contents]:
        """Return the messages that have come. Raises :class:`FrameError`."""
        return [decode_contents(frame) for frame in self.channel.receive()]


class EngineChannel:
    """The engine's end. One thread uses it."""

    def __init__(
        self,
        url: str | None = None,
        keys: CurveKeys | None = None,
        key_of: Callable[[int], str] = lambda rank: "",
        size: int = sys.maxsize,
    ) -> None:
        """Listen at ``url``, or at a private ipc address, for ranks below ``size``. ``key_of``: each rank's public key,
        with ``keys``. Raises :class:`InvalidValue` for an address in use."""
        self._hub, self._key_of, self._size = Hub("control", url, keys), key_of, size
        self.url = self._hub.url
        self._ranks: dict[int, Channel] = {}
        self._numbers: dict[Channel, int] = {}
        self._gone: dict[int, str] = {}
        self._parts = False  # the last message was sent
        self._beats = Beats(lambda: self._hub.channels)

    @property
    def sockets(self) -> tuple[Any, ...]:
        """Return the sockets to poll; none once closed."""
        return () if self._hub.is_closed else (self._hub,)

    def receive(self, timeout: float = 0.0) -> list[tuple[int, Message | OutputRecord]]:
        """Return what ranks have sent, each in its order; wait up to ``timeout`` seconds for something to happen."""
        return self._known(self._hub.receive(timeout))

    def _known(self, received: Iterable[tuple[Channel, memoryview | None]]) -> list[tuple[int, Message | OutputRecord]]:
        found: list[tuple[int, Message | OutputRecord]] = []
        for channel, frame in received:
            if frame is None:
                if (rank := self._numbers.get(channel)) is not None:
                    self._gone.setdefault(rank, channel.ended)
                continue
            if channel.ended == CLOSED:  # over a frame before this one
                continue
            try:
                contents = decode_contents(frame)
            except FrameError as error:  # another version, or no rank
                if (rank := self._numbers.get(channel)) is not None:
                    self._gone.setdefault(rank, str(error))
                self._hub.drop(channel)
                continue
            if isinstance(contents, Hello) and contents.rank not in self._ranks and channel not in self._numbers:
                if not 0 <= contents.rank < self._size or channel.key != self._key_of(contents.rank):
                    self._hub.drop(channel)
                    continue
                self._ranks[contents.rank], self._numbers[channel] = channel, contents.rank
            if channel in self._numbers and not isinstance(contents, StepOrder):
                found.append((self._numbers[channel], contents))
        return found

    def send(self, message: Message, *ranks: int) -> list[int]:
        """Send a message to some ranks, or to all known ranks. Return those that read no more."""
        self._parts = self._parts or isinstance(message, Stop)
        return self._send(_MESSAGE, encode_message(message), ranks or tuple(self._ranks))

    def order(self, order: StepOrder, *ranks: int) -> list[int]:
        """Send ranks a step. Return those that read no more."""
        return self._send(_STEP, encode_step(order), ranks)

    def _send(self, kind: bytes, body: Buffer, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if rank not in self._ranks or not self._ranks[rank].send(kind, body)]

    def gone(self) -> dict[int, str]:
        """Return the ranks whose connections have ended, and why."""
        return self._gone

    def silent(self) -> dict[int, str]:
        """Return these ranks, and those that were silent for ``TIMEOUTS.silence``. Call it after
        :meth:`receive`, since this process may have been stopped itself."""
        now = time.monotonic()
        for rank, channel in self._ranks.items():
            if now - channel.heard > TIMEOUTS.silence:
                self._gone.setdefault(rank, f"nothing came from it for {TIMEOUTS.silence:g} s: it is stopped, or hangs")
        return self._gone

    def last_messages(self) -> list[tuple[int, Message | OutputRecord]]:
        """End the sending. Return the last messages of ranks that are ending, for up to ``TIMEOUTS.parting``. They
        receive all that was sent before."""
        return self._known(self._hub.farewell(TIMEOUTS.parting))

    def close(self) -> None:
        """Close, and release the address; idempotent. After the last message ranks have time to read it first."""
        if self._hub.is_closed:
            return
        if self._parts:
            self.last_messages()
        self._beats.close()
        self._hub.close()


class RankChannel:
    """A rank's end. One thread receives; any thread may send."""

    def __init__(self, url: str, rank: int, keys: CurveKeys | None = None) -> None:
        """Connect to the engine at ``url``. Raises :class:`GroupLost` if none is there."""
        self.rank, self._local = rank, socket_of(url) is not None
        try:
            channel = connect(url, "control", keys)
            why = "" if channel.establish(TIMEOUTS.silence) else channel.ended or "no answer"
            if why:
                channel.close()
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise GroupLost(
                f"rank {rank} finds no engine at {url}: {why}",
                cure="see the output of the process that started the ranks",
                argument="engine",
            )
        self._channel, self.end = channel, ControlEnd(channel)
        self._beats = Beats(lambda: (channel,))
        self._poller = select.poll()
        self._poller.register(channel, select.POLLIN)
        self._watched: tuple[Any, ...] = ()
        self._wants_room = False  # is polled for, too
        self._received: list[Message | StepOrder] = []
        self._take()  # what came with the connection, which no poll shows

    def watch(self, sockets: Iterable[Any]) -> None:
        """Make :meth:`receive` return None as soon as one of these can be read, too."""
        if (wanted := tuple(sockets)) == self._watched:
            return
        for former in self._watched:
            self._poller.unregister(former)
        self._watched = wanted
        for one in wanted:
            self._poller.register(one, select.POLLIN)

    def receive(self, timeout: float) -> Message | StepOrder | None:
        """Return the next message or step; None after ``timeout`` seconds, or if something watched can be read.

        Raises :class:`GroupLost` if the engine has gone; :class:`FrameError` for invalid bytes.
        """
        now = time.monotonic()
        end = now + timeout
        while not self._received:
            if (room := self._channel.wants_room) is not self._wants_room:
                self._wants_room = room
                self._poller.modify(self._channel, select.POLLIN | select.POLLOUT * room)
            ready = self._poller.poll(1000 * max(0.0, min(end - now, TIMEOUTS.silence)))
            if self._take():
                break
            now = time.monotonic()
            self._check_engine(now)
            if now >= end or any(number != self._channel.fileno() for number, _ in ready):
                return None
        return self._received.pop(0)

    def answer(self, timeout: float) -> Agreed | Stop | None:
        """Return the engine's answer to :class:`Raised`, or None after ``timeout`` seconds. :meth:`receive` returns the
        messages before it later. Raises as :meth:`receive`."""
        self.watch(())
        end, earlier = time.monotonic() + timeout, list[Message | StepOrder]()
        try:
            while (left := end - time.monotonic()) > 0:
                message = self.receive(left)
                if isinstance(message, Agreed) or (isinstance(message, Stop) and message.what):
                    return message
                if message is not None:
                    earlier.append(message)
            return None
        finally:
            self._received[:0] = earlier

    def send(self, message: Message, wait: float | None = None) -> bool:
        """Send a message; wait up to ``wait`` seconds (``TIMEOUTS.deadline``) until it has left. Return whether it
        has."""
        return self.end.send(message, TIMEOUTS.deadline if wait is None else wait)

    def close(self) -> None:
        """Close, once the engine has read all frames, or after ``TIMEOUTS.parting``."""
        self._beats.close()
        self._channel.part(TIMEOUTS.parting)

    def _take(self) -> bool:
        self._received += [one for one in self.end.receive() if not isinstance(one, OutputRecord)]
        return bool(self._received)

    def _check_engine(self, now: float) -> None:
        why = self._channel.ended
        if not self._local and now - self._channel.heard > TIMEOUTS.silence:
            why = why or f"nothing came for {TIMEOUTS.silence:g} s"
        if why:
            raise GroupLost(
                f"rank {self.rank} has lost the engine: {why}",
                cure="see the output of the process that started the ranks",
                argument="engine",
            )
