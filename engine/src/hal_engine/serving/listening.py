"""uvicorn's server as `hal serve` runs it: what it prints, notifies and logs as it begins to listen and as it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
from hal_core import Unavailable

from hal.cli import signals
from hal.cli.console import LineWriter, lines_are_written, say
from hal_engine.timeouts import TIMEOUTS

from .drain import Drain
from .gate import Gate
from .readiness import Readiness

_PENDING = 2048
"""Connections that the kernel holds until the server takes them."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a server is made of beside its application.

    ``title``: the model's name. ``lines``: the access log's, None for none. ``on_error``: called with the error of a
    Unix socket that cannot be made; uvicorn logs those of others.
    """

    title: str
    drain: Drain
    gate: Gate
    readiness: Readiness
    lines: LineWriter | None
    on_error: Callable[[OSError], object]


def check_path(path: str) -> None:
    """Raise :class:`hal_core.Unavailable` for a Unix socket's path that something has: a server that listens there, or
    what is no socket. The socket of a server that has ended is replaced."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise Unavailable(f"{path} is there, and is no socket", cure="choose another path", argument="--uds")
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(TIMEOUTS.look)
            one.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        what = f"{path}: {error.strerror or error}"
        raise Unavailable(what, cure="name a socket in a folder that this user may write", argument="--uds") from error
    raise Unavailable(f"{path}: a server listens there", cure="choose another path, or stop it", argument="--uds")


class Listening(uvicorn.Server):
    """Prints where it listens, and has its requests end within the drain."""

    def __init__(self, config: uvicorn.Config, parts: Parts) -> None:
        super().__init__(config)
        self._parts = parts
        self._socket: tuple[str, int] | None = None  # the Unix socket's path and inode

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See :class:`uvicorn.Server`; signals that are ignored stay so, as nohup and a background job have it."""
        ignored = [number for number in signals.NUMBERS if signal.getsignal(number) is signal.SIG_IGN]
        with super().capture_signals():
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See :class:`uvicorn.Server`; in the drain SIGTERM ends it too (``timeout`` sends two, but at once)."""
        self.force_exit = self._parts.drain.has_begun
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See :class:`uvicorn.Server`."""
        try:
            await super().startup(sockets)
        except OSError as error:
            self._parts.on_error(error)
            await self.lifespan.shutdown()
            raise SystemExit(1) from error
        if self.started:
            gc.freeze()  # a collection among all that is imported takes 50 ms, in which no client is served
            self._announce()

    def _announce(self) -> None:
        listening, limits = self.servers[0].sockets, self._parts.gate.limits
        for one in listening:
            with socket.fromfd(one.fileno(), one.family, one.type) as again:
                again.listen(_PENDING)  # uvicorn's number is also that of those taken at once
        address = address_of(listening[0], secure=self.config.is_ssl)
        if self.config.uds is not None:
            self._socket = self.config.uds, os.stat(self.config.uds).st_ino
        most = f"at most {limits.connections} connections, {limits.bytes >> 20} MiB of requests"
        say(f"hal: the model {self._parts.title!r} is on {address} ({most}); /health is 200 when its engine is loaded")
        under = f", root path {self.config.root_path}" if self.config.root_path else ""
        self._parts.readiness.listening(address + under)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See :class:`uvicorn.Server`."""
        drain, lines = self._parts.drain, self._parts.lines
        drain.begin()
        if running := len(self.server_state.tasks):
            requests = f"{running} request{'s have' if running > 1 else ' has'}"
            say(f"hal: stopping: {requests} {drain.seconds:g} s (a second signal ends them now)")
        self._parts.readiness.stopping()
        while self.servers:  # uvicorn waits for those that it knows: from Python 3.12 on, until their clients have gone
            self.servers.pop().close()
        await super().shutdown(sockets)
        if self._socket is not None:  # from Python 3.13 on asyncio does so
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._socket[0]).st_ino == self._socket[1]:
                    os.unlink(self._socket[0])
        if drain.cut:
            say(f"hal: {drain.cut} request{'s' * (drain.cut > 1)} ended with an error at the end of --drain")
        if lines is not None:
            lines.wait(TIMEOUTS.shown)
        lines_are_written(TIMEOUTS.shown)  # the signal that uvicorn raises again ends the process at once


def address_of(listening: socket.socket, *, secure: bool) -> str:
    """Return where a client reaches the server."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    at, number, *_ = listening.getsockname()
    return f"{'https' if secure else 'http'}://{f'[{at}]' if ':' in at else at}:{number}"
