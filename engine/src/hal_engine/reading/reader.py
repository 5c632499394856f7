"""OutputReader: the records of all workers that send to one url, in order, each once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING

from hal_core import HalError, InvalidValue, OutputRecord
from hal_core.frames import Frame

from hal_engine.reading.events import Event, SessionEnded, StreamLoss
from hal_engine.reading.receiver import Receiver
from hal_engine.reading.session import Session
from hal_engine.timeouts import MOST_POLLED, TIMEOUTS, UNBOUNDED
from hal_engine.transport.curve import CurveKeys
from hal_engine.transport.urls import adopt_ipc, private_ipc_url, release_folder

if TYPE_CHECKING:
    from hal_engine.transport.hub import Hub


class OutputReader:
    """Reads what workers send to ``url``, which it binds; without one it makes a private ipc url (see ``url``).

    ``after`` is where to continue: the ``(session, sequence)`` of the last processed record, or a mapping of several.
    Later frames that the sender still holds come again; without it, all unacknowledged frames.

    With ``auto_ack`` a record counts as processed when the next one is read, or at ``close``, but not when an exception
    ends the ``with`` block; else only :meth:`acknowledge` marks it. ``timeout`` bounds the wait of the iterators for
    one record, in seconds.

    A session is lost if it is silent for ``lost_after`` seconds, ``grace`` seconds after its connection broke, or if
    its worker has started again; its later frames are refused. Events go to ``on_event``. Without it, the next read
    raises losses (:class:`SessionLost`, :class:`Gap`), and reading may continue afterwards.

    With ``curve`` a tcp url is encrypted, and only the senders that it names are accepted.

    One thread at a time, or one event loop. A record's arrays are views of its message, at most 64 KB or one frame;
    copy the ones to keep for long.
    """

    def __init__(
        self,
        url: str | None = None,
        after: tuple[int, int] | Mapping[int, int] | None = None,
        *,
        auto_ack: bool = True,
        timeout: float | None = None,
        lost_after: float = TIMEOUTS.lost_after,
        grace: float = TIMEOUTS.grace,
        on_event: Callable[[Event], None] | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        cursors = _cursors(after)
        self._acknowledge, self._due = TIMEOUTS.pause, 0.0  # seconds from one acknowledgement of all to the next
        for name, seconds in (("timeout", timeout), ("lost_after", lost_after), ("grace", grace)):
            if not (seconds is None and name == "timeout"):
                _check_seconds(seconds, name)
        self._owns_folder = url is None
        url = private_ipc_url() if url is None else url
        try:
            self._receiver = Receiver(url, cursors, lost_after, grace, curve)
        except BaseException:
            if self._owns_folder:
                release_folder(url)
            raise
        adopt_ipc(url)
        self.url = self._receiver.url  #: where senders connect; port wildcards are resolved
        self._auto_ack, self._timeout, self._on_event = auto_ack, timeout, on_event
        self._last: Session | None = None  # the session of the last returned record
        self._was_good_bye = False  # a goodbye was among the events reported since ``ready`` was empty
        self._ended = self._closed = False
        self._pid = os.getpid()

    def read(self, timeout: float | None = None) -> Frame | None:
        """Return the next frame, or None after ``timeout`` seconds or when the last session has ended for good."""
        self._ended = False
        if (frame := self._next_ready()) is not None or self._ended:
            return frame
        self._check_wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while (frame := self._next_ready()) is None and not self._ended:
            left = UNBOUNDED if end is None else end - time.monotonic()
            pending = self._acknowledges_pending()
            if self._receiver.receive(min(left, self._acknowledge) if pending else left):
                continue
            if pending:
                self._acknowledge_read(at_least=1)
            elif left <= 0:
                return None
        return frame

    async def read_async(self, timeout: float | None = None) -> Frame | None:
        """Read as :meth:`read` does, without blocking the event loop."""
        self._ended = False
        if (frame := self._next_ready()) is not None or self._ended:
            return frame
        self._check_wait(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while (frame := self._next_ready()) is None and not self._ended:
            left = UNBOUNDED if end is None else end - time.monotonic()
            if self._receiver.receive():
                continue
            self._acknowledge_read(at_least=1)
            if left <= 0:
                return None
            await self._wait_async(left)
        return frame

    def __iter__(self) -> Iterator[OutputRecord]:
        """Yield records until the last session has ended, or none came for ``timeout`` seconds."""
        while (frame := self.read(self._timeout)) is not None:
            yield frame.record

    async def __aiter__(self) -> AsyncIterator[OutputRecord]:
        """Yield records until the last session has ended, or none came for ``timeout`` seconds."""
        while (frame := await self.read_async(self._timeout)) is not None:
            yield frame.record

    @property
    def cursors(self) -> dict[int, int]:
        """Return session -> sequence of the last returned record, for live sessions."""
        return {number: session.read for number, session in self._receiver.sessions.items()}

    def acknowledge(self, session: int | None = None, sequence: int | None = None) -> None:
        """Mark records as processed: all returned ones, those of one session, or those up to a sequence.

        Raises InvalidValue for a sequence that was not returned, TypeError for no whole number. An ended session needs
        no acknowledgement.
        """
        for number, known in self._receiver.sessions.items():
            if session in (None, number):
                upto = known.read if sequence is None else index(sequence)
                if upto > known.read:
                    raise InvalidValue(f"{upto} was not read yet", cure=f"at most {known.read}", argument="sequence")
                self._receiver.acknowledge(known, upto)

    @property
    def sockets(self) -> tuple[Hub, ...]:
        """Return what to poll (anything that takes a ``fileno()``); when it can be read, call ``read(0)`` until it
        returns None."""
        return (self._receiver.hub,)

    def counters(self) -> dict[str, int]:
        """Return the frames read, duplicates dropped, and stretches of bytes skipped because they were no frames."""
        receiver = self._receiver
        return {"frames": receiver.frames, "duplicates": receiver.duplicates, "skipped": receiver.skipped}

    def close(self) -> None:
        """Acknowledge returned records if that is automatic, close, and remove the ipc socket. Idempotent.

        In a forked child it has no effect, as everything belongs to the parent.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._acknowledge_read(at_least=1)
        self._receiver.close()
        if self._owns_folder:
            release_folder(self.url)

    def __enter__(self) -> OutputReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After an exception the last returned record counts as unprocessed: it comes again."""
        if kind is not None and self._last is not None:
            self._last.read = max(self._last.acknowledged, self._last.read - 1)
        self.close()

    def _check_wait(self, timeout: float | None) -> None:
        if self._closed:
            raise HalError("the reader is closed", cure="open a new one")
        if timeout is not None:
            _check_seconds(timeout, "timeout")

    def _next_ready(self) -> Frame | None:
        """Return the next available frame; report the events before it."""
        last = self._last
        if last is not None and self._auto_ack:
            if (now := time.monotonic()) >= self._due:  # a window may be full, while other sessions keep this one busy
                self._due = now + self._acknowledge
                self._acknowledge_read(at_least=1)
            elif last.read - last.acknowledged >= last.acknowledge_every:
                self._receiver.acknowledge(last, last.read)
        ready = self._receiver.ready
        while ready:
            item = ready.popleft()
            if isinstance(item, tuple):
                self._last, frame = item
                self._last.read = frame.header.sequence
                return frame
            self._was_good_bye |= isinstance(item, SessionEnded) and not item.again
            if self._on_event is not None:
                self._on_event(item)
            elif isinstance(item, StreamLoss):
                raise item
        self._ended = self._was_good_bye and not self._receiver.sessions  # after the losses beside it were reported
        self._was_good_bye = False
        return None

    def _acknowledges_pending(self) -> bool:
        sessions = self._receiver.sessions.values()
        return self._auto_ack and any(session.read > session.acknowledged for session in sessions)

    def _acknowledge_read(self, at_least: int) -> None:
        """Acknowledge automatically the sessions with at least so many frames read since the last time."""
        if self._auto_ack:
            for session in self._receiver.sessions.values():
                if session.read - session.acknowledged >= at_least:
                    self._receiver.acknowledge(session, session.read)

    async def _wait_async(self, seconds: float) -> None:
        """Wait until something has come, or until it is time to look for losses."""
        loop, receiver = asyncio.get_running_loop(), self._receiver
        changed = asyncio.Event()
        loop.add_reader(receiver.hub, changed.set)
        try:
            async with asyncio.timeout(max(0.0, min(seconds, receiver.look_seconds()))):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            loop.remove_reader(receiver.hub)


def _cursors(after: tuple[int, int] | Mapping[int, int] | None) -> dict[int, int]:
    """Return ``after`` as session -> sequence."""
    try:
        given = dict([after]) if isinstance(after, tuple) else dict(after or {})
        cursors = {index(session): index(sequence) for session, sequence in given.items()}
        sound = all(0 < session < 1 << 64 and 0 <= sequence < 1 << 63 for session, sequence in cursors.items())
    except (TypeError, ValueError):
        sound = False
    if not sound:
        what = f"{after!r} is not a (session, sequence) of two integers"
        raise InvalidValue(what, cure="give a former cursor", argument="after")
    return cursors


def _check_seconds(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST_POLLED:
        cure = f"give seconds, 0 to {MOST_POLLED:.0f}" + (", or None" if name == "timeout" else "")
        raise InvalidValue(f"{name} is {value!r}", cure=cure, argument=name)
