"""The reader's side of shared memory: its domain, and in it a queue for each session.

:mod:`hal.transport.shared_memory` has what both sides use, and the sink's.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

from hal_core import FrameError, Unavailable
from hal_core.frames import FrameHeader, read_header

from hal.transport import domains
from hal.transport.shared_memory import BORROWED, QUEUED, VIEWS, Loan, builder_of, errors, library, make_node, owned

_log = logging.getLogger("hal.transport")


class SharedQueue:
    """The reader's side of one session."""

    owns = ("_subscriber", "_service")

    def __init__(self, iox: Any, node: Any, session: int) -> None:  # noqa: ANN401
        domains.check_room()
        self._session = session
        self._receive_errors = (iox.ReceiveError, iox.ConnectionFailure)
        builder = builder_of(iox, node, session).max_publishers(1).max_subscribers(1).max_nodes(2).history_size(0)
        builder = builder.enable_safe_overflow(False).subscriber_max_buffer_size(QUEUED)
        self._service = builder.subscriber_max_borrowed_samples(BORROWED).create()
        self._subscriber = self._service.subscriber_builder().create()
        self._ahead: tuple[FrameHeader, memoryview] | None = None
        self._views: weakref.WeakSet[Loan] = weakref.WeakSet()
        owned.add(self)

    def take(self, sequence: int) -> tuple[FrameHeader, memoryview]:
        """Return the frame of that number, read-only, a view of its sample. Raises FrameError if it is not there.

        Those before it are dropped. While ``VIEWS`` frames are still viewed by somebody it is a copy.
        """
        while (found := self._next()) is not None:
            header, frame = found
            if header.sequence > sequence:
                self._ahead = found
                break
            if header.sequence == sequence:
                if len(self._views) > VIEWS:
                    frame = memoryview(bytes(frame))
                return header, frame
        raise FrameError(f"frame {sequence} is not in shared memory", cure="none: it is asked for again")

    def forget(self, sequence: int) -> None:
        """Drop what waits up to this frame, which came as bytes: it would take the place of others."""
        while (found := self._next()) is not None:
            if found[0].sequence > sequence:
                self._ahead = found
                break

    def close(self) -> None:
        """Frames that were taken stay as they are."""
        self._ahead = None
        if self._subscriber is not None:
            self._subscriber.delete()
        self._subscriber = self._service = None

    def _next(self) -> tuple[FrameHeader, memoryview] | None:
        """The sample that waits first. Raises FrameError for one that is no frame of this session."""
        if (ahead := self._ahead) is not None:
            self._ahead = None
            return ahead
        try:
            sample = self._subscriber.receive()
        except self._receive_errors as error:
            raise FrameError(f"shared memory cannot be read: {error}", cure="none: it is asked for again") from error
        if sample is None:
            return None
        loan = Loan(sample)
        frame = loan.view(sample.header.number_of_elements).toreadonly()
        header = read_header(frame)
        if header.session != self._session:
            raise FrameError("a frame of another session lies in shared memory", cure="none: it is asked for again")
        self._views.add(loan)
        return header, frame


class SharedReceiver:
    """The reader's side: its domain, where each session gets a queue."""

    owns = ("_node",)

    def __init__(self, socket: Path) -> None:
        self._iox = iox = library()
        self._socket = socket
        self.name, self._folder, self._lock = domains.make_domain(socket)
        self._node: Any = None
        try:
            self._node = make_node(iox, self.name, self._folder)
        except Unavailable as error:
            self._remove()
            cure = f"{error.cure}; or use ipc://"
            raise Unavailable(f"no shared memory for {socket}: {error.what}", cure=cure, argument="url") from error
        except errors(iox) as error:
            self._remove()
            cure = 'choose a path of plain ASCII without control characters and "*<>?|, or use ipc://'
            raise Unavailable(f"no shared memory for {socket}: {error}", cure=cure, argument="url") from error
        owned.add(self)

    def queue(self, session: int) -> SharedQueue | None:
        """Make the session's queue; None, and a word in the log, where that fails."""
        queue: SharedQueue | None = None
        try:
            domains.folder_of(self._socket, self.name)  # iceoryx2 would make one that was removed again
            queue = SharedQueue(self._iox, self._node, session)
            domains.folder_of(self._socket, self.name)
            return queue
        except errors(self._iox) as error:
            if queue is not None:
                queue.close()
            domains.remove_if_revived(self._folder)
            _log.warning("no shared memory for session %016x, it comes through the socket: %s", session, error)
            return None

    def clean(self) -> None:
        """Remove what workers that are dead have left here."""
        self._node.try_cleanup_dead_nodes()

    def close(self) -> None:
        """Remove the domain. Idempotent; frames that were taken stay as they are."""
        self._node = None
        if self._lock >= 0:
            self._remove()

    def leave(self) -> None:
        """Let go of the lock without removing anything: the domain is the parent's."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove(self) -> None:
        domains.remove_domain(self._folder)
        self.leave()
