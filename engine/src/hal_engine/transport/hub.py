"""The channels that one thread serves: those that come to its address, and those that it has made itself."""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
import weakref

from hal_core import InvalidValue

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel
from hal_engine.transport.curve import CurveKeys, Handshake, Purpose
from hal_engine.transport.descriptors import READER, check_descriptors
from hal_engine.transport.places import listen
from hal_engine.transport.urls import private_ipc_url, release_folder, scheme_of, socket_of

Received = list[tuple[Channel, memoryview | None]]
"""Messages with their channels, in order; None: the channel has ended, after its last message."""
_BACKLOG = 128
_MOST_STRANGERS = 64
"""Connections that have not shown their purpose; the oldest is closed first."""
_ACCEPTED = 8
"""Connections that one call accepts: each is read several times before so many others have come that it is closed."""
_hubs: weakref.WeakSet[Hub] = weakref.WeakSet()


class Hub:
    """Listens at ``url``, by default at a private ipc address, for connections of one purpose. One thread uses it;
    :meth:`fileno` is one descriptor to poll for all channels."""

    def __init__(self, purpose: Purpose, url: str | None = None, keys: CurveKeys | None = None) -> None:
        """``keys``: this side's, for tcp. Raises :class:`InvalidValue` for an address that cannot be used."""
        self._purpose, self._owns_folder, self._keys, self._pid = purpose, url is None, keys, os.getpid()
        check_descriptors(READER, f"a reader of {url or 'a private address'}", argument="url")
        self.url = private_ipc_url() if url is None else url
        with contextlib.ExitStack() as undo:
            if self._owns_folder:
                undo.callback(release_folder, self.url)
            if scheme_of(self.url) != "tcp" and keys is not None:
                cure = "ipc is private by its folder"
                raise InvalidValue(f"{self.url!r} is no tcp address", cure=cure, argument="curve")
            self._door = listen(self.url, socket_of(self.url), _BACKLOG)
            undo.callback(self._door.close)
            self.url = self._door.url
            self._epoll = select.epoll()
            self._epoll.register(self._door, select.EPOLLIN)
            undo.pop_all()
        self._channels: dict[int, Channel] = {}
        self._with_room = set[int]()  # channels that are polled for room to write, too
        self._strangers: dict[Channel, float] = {}
        self._full_until = 0.0  # no descriptors are left for new connections
        _hubs.add(self)

    def fileno(self) -> int:
        """Return the descriptor to poll: it can be read when :meth:`receive` has something to do."""
        return self._epoll.fileno()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._epoll.closed

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels that have not ended. May be read by any thread."""
        return tuple(self._channels.values())

    def add(self, channel: Channel) -> Channel:
        """Serve a channel that was made elsewhere, too."""
        self._channels[channel.fileno()] = channel
        self._epoll.register(channel, select.EPOLLIN)
        return channel

    def drop(self, channel: Channel) -> None:
        """Close a channel. It is not reported as ended."""
        if self._channels.pop(number := channel.fileno(), None) is not None:
            self._epoll.unregister(channel)
            self._with_room.discard(number)
        self._strangers.pop(channel, None)
        channel.close()

    def receive(self, timeout: float = 0.0) -> Received:
        """Return what has come; wait up to ``timeout`` seconds for something to happen."""
        self._watch()
        received: Received = []
        for number, _ in self._epoll.poll(math.ceil(1000 * timeout) / 1000):
            if number == self._door.fileno():
                self._accept()
            elif (channel := self._channels.get(number)) is not None:
                received += [(channel, message) for message in channel.receive()]
                if channel.ended:
                    self.drop(channel)
                    received.append((channel, None))
                elif channel.is_trusted:
                    self._strangers.pop(channel, None)
        return received

    def farewell(self, seconds: float) -> Received:
        """Send nothing more, and return what still comes until every channel has ended, or for ``seconds``. Peers
        receive all that was sent to them."""
        received, end = Received(), time.monotonic() + seconds
        finished = set[Channel]()
        while self._channels and (left := end - time.monotonic()) > 0:
            for channel in self.channels:
                if channel not in finished and not channel.pending:
                    finished.add(channel)
                    channel.finish()
            received += self.receive(min(left, TIMEOUTS.look))
        return received

    def close(self) -> None:
        """Close all channels and release the address. Idempotent. A forked child leaves everything to its parent."""
        if os.getpid() != self._pid or self.is_closed:
            return
        for channel in self.channels:
            self.drop(channel)
        self._door.close()
        self._epoll.close()
        if self._owns_folder:
            release_folder(self.url)

    def _watch(self) -> None:
        """Poll for room where bytes wait; forget strangers that do not show their purpose in time; listen again."""
        for number, channel in self._channels.items():
            if channel.wants_room is not (number in self._with_room):
                self._with_room ^= {number}
                self._epoll.modify(channel, select.EPOLLIN | (select.EPOLLOUT if channel.wants_room else 0))
        if self._strangers or self._full_until:
            now = time.monotonic()
            for channel in [one for one, since in self._strangers.items() if now - since > TIMEOUTS.greeting]:
                self.drop(channel)
            if self._full_until and now > self._full_until:
                self._full_until = 0.0
                self._epoll.modify(self._door, select.EPOLLIN)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            try:
                sock = self._door.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor is left: the kernel keeps the connection until there is one
                self._full_until = time.monotonic() + TIMEOUTS.look
                self._epoll.modify(self._door, 0)
                return
            channel = self.add(Channel(sock, Handshake(self._purpose, self._keys, calls=False)))
            self._strangers[channel] = time.monotonic()
            if len(self._strangers) > _MOST_STRANGERS:
                self.drop(next(iter(self._strangers)))

    def leave_to_parent(self) -> None:
        """In a forked child, close the descriptors, so that they end with the parent and not with its children. Each by
        its object, which closes a number only once: the child may soon use it for another file."""
        self._epoll.close()
        self._door.leave_to_parent()
        for channel in self.channels:
            channel.leave_to_parent()


def _leave_to_parent() -> None:
    for hub in _hubs:
        if not hub.is_closed:
            hub.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
