"""The channels that one thread serves: those that come to its address, and those that it has made itself."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import time
import weakref

from hal_core import InvalidValue

from hal_engine.timeouts import TIMEOUTS
from hal_engine.transport.channel import Channel, tune
from hal_engine.transport.curve import CurveKeys, Handshake
from hal_engine.transport.descriptors import READER, check_descriptors
from hal_engine.transport.places import bind_path, unbind_path
from hal_engine.transport.urls import private_ipc_url, release_folder, scheme_of, socket_of

Received = list[tuple[Channel, memoryview | None]]
"""Messages with their channels, in order; None: the channel has ended, after its last message."""
_BACKLOG = 128
_MOST_STRANGERS = 64
"""Connections that have not shown a key yet; the oldest is closed first."""
_ACCEPTED = 8
"""Connections that one call accepts: each is read several times before so many others have come that it is closed."""
_NO_ADDRESS = "that is no address of this host", "name one that it has, by number or by a name that it knows"
_REFUSED = {
    errno.EADDRINUSE: ("another program listens there", "choose a free port"),
    errno.EACCES: ("this user may not", "choose a port above 1023, or a folder that this user can write to"),
    errno.EADDRNOTAVAIL: _NO_ADDRESS,
}
_hubs: weakref.WeakSet[Hub] = weakref.WeakSet()


class Hub:
    """Listens at ``url``, by default at a private ipc address. One thread uses it; :meth:`fileno` is one descriptor to
    poll for all channels."""

    def __init__(self, url: str | None = None, keys: CurveKeys | None = None) -> None:
        """``keys``: this side's, for tcp. Raises :class:`InvalidValue` for an address that cannot be used."""
        self._owns_folder, self._keys, self._pid = url is None, keys, os.getpid()
        check_descriptors(READER, f"a reader of {url or 'a private address'}", argument="url")
        self.url = private_ipc_url() if url is None else url
        with contextlib.ExitStack() as undo:
            if self._owns_folder:
                undo.callback(release_folder, self.url)
            scheme, self._path = scheme_of(self.url), socket_of(self.url)
            self._door, self._identity = self._listen(scheme)
            undo.callback(self._shut)
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
        self._shut()
        self._epoll.close()
        if self._owns_folder:
            release_folder(self.url)

    def _shut(self) -> None:
        if self._path is not None:
            unbind_path(self._path, self._identity)
        self._door.close()

    def _listen(self, scheme: str) -> tuple[socket.socket, tuple[int, int]]:
        if (path := self._path) is not None:
            if self._keys is not None:
                cure = "ipc is private by its folder"
                raise InvalidValue(f"{self.url!r} is no tcp address", cure=cure, argument="curve")
            return bind_path(self.url, path, _BACKLOG)
        host, _, port = self.url.removeprefix(f"{scheme}://").rpartition(":")
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(("" if host == "*" else host, 0 if port == "*" else int(port)))
            door.listen(_BACKLOG)
        except OSError as error:
            door.close()
            no_name = _NO_ADDRESS if isinstance(error, socket.gaierror) else None
            why, cure = no_name or _REFUSED.get(error.errno or 0, (str(error), "choose another address"))
            raise InvalidValue(f"cannot bind {self.url!r}: {why}", cure=cure, argument="url") from error
        door.setblocking(False)
        found, number = door.getsockname()
        self.url = f"{scheme}://{found}:{number}"
        return door, (0, 0)

    def _watch(self) -> None:
        """Poll for room where bytes wait; forget strangers that show no key in time; listen again."""
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
                sock, _ = self._door.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor is left: the kernel keeps the connection until there is one
                self._full_until = time.monotonic() + TIMEOUTS.look
                self._epoll.modify(self._door, 0)
                return
            if self._path is None:
                tune(sock)
            channel = self.add(Channel(sock, None if self._keys is None else Handshake(self._keys, calls=False)))
            if not channel.is_trusted:
                self._strangers[channel] = time.monotonic()
                if len(self._strangers) > _MOST_STRANGERS:
                    self.drop(next(iter(self._strangers)))

    def leave_to_parent(self) -> None:
        """In a forked child, close the descriptors, so that they end with the parent and not with its children."""
        for number in (self._door.fileno(), self._epoll.fileno(), *self._channels):
            with contextlib.suppress(OSError):
                os.close(number)


def _leave_to_parent() -> None:
    for hub in _hubs:
        if not hub.is_closed:
            hub.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
