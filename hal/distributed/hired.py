"""A worker that was started by itself: it waits for an engine, starts its ranks for it, and ends with them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from hal_core import GroupLost, InvalidValue

from hal.model.digest import checkpoint_digest
from hal.transport.curve import CurveKeys
from hal.transport.parts import joined
from hal.transport.sockets import Bound
from hal.transport.urls import scheme_of

from .hiring import Beat, Begin, Dismissed, Ended, Meet, Met, Said, pack, unpack
from .launch import PaddleLaunch
from .lines import SILENCE
from .process import KEY, LOST, MODEL
from .words import PROTOCOL

_LOOK_SECONDS = 0.1
_LEAVE_SECONDS = 10.0
"""Seconds that ranks have to end."""
_HEARD_SECONDS = 10.0
"""Seconds that the engine has to say that it has heard of their end, or why it is refused."""


@dataclass(frozen=True)
class Post:
    """What a worker is: its role's name, its ranks, where it listens, its checkpoint and the file of its key."""

    role: str
    tp: int
    url: str
    model: Path
    key: Path | None = None

    @property
    def host(self) -> str:
        """Where its ranks can be reached, "" within one host. Raises InvalidValue for every address of a host."""
        if scheme_of(self.url) != "tcp":
            return ""
        host = self.url.partition("://")[2].rpartition(":")[0]
        if host in ("*", "0.0.0.0", "[::]"):
            cure = "name the one address of this host by which the others reach it"
            raise InvalidValue(f"{self.url!r} is every address of this host", cure=cure, argument="--listen")
        return host


class HiredWorker:
    """Listens for an engine. A context manager."""

    def __init__(self, post: Post, keys: CurveKeys | None, versions: dict[str, str]) -> None:
        """Raises :class:`InvalidValue` for an address that cannot be used or is in use, or a checkpoint."""
        self._post, self._versions = post, versions
        self._host, self._checkpoint = post.host, checkpoint_digest(post.model)
        self._bound = Bound(post.url, keys)
        self.url = post.url
        if scheme_of(post.url) == "tcp":
            self.url = bytes(self._bound.socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._engine: bytes | None = None
        self._heard = 0.0
        self._launch: PaddleLaunch | None = None
        self._over: Dismissed | None = None
        self.how = ""
        """How the ranks have ended, in words."""

    def __enter__(self) -> HiredWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._launch is not None:
            self._launch.end(0.0)
        self._bound.close()
        self._bound.release()

    def serve(self, timeout: float, look: Callable[[], None] = lambda: None) -> int:
        """Wait up to ``timeout`` seconds for an engine, and be its worker to the end; the exit status: 1 where ranks
        were lost, 2 where they refused.

        ``look`` is called now and then, and may raise what ends it. Raises :class:`InvalidValue` where no engine comes
        or the engine refuses, :class:`GroupLost` when the engine is gone.
        """
        end = time.monotonic() + timeout
        while self._over is None:
            look()
            self._hear(_LOOK_SECONDS)
            now = time.monotonic()
            if self._engine is None and now > end:
                raise InvalidValue(
                    f"no engine with this key came to {self.url} within {timeout:g} s",
                    cure="start hal run --workers with this url, and with the same --key",
                    argument="--listen",
                )
            if self._engine is not None and now - self._heard > SILENCE:
                cure = "see what became of hal run"
                raise GroupLost(f"nothing was heard of the engine for {SILENCE:g} s", cure=cure, argument="engine")
            if self._launch is not None and (how := self._launch.ended()):
                self._leave(how)
                break
        if self._over is not None and self._over.what:
            raise InvalidValue(f"the engine refuses: {self._over.what}", cure=self._over.cure)
        if self._launch is None:
            return 0
        patience = time.monotonic() + _LEAVE_SECONDS
        while not (how := self._launch.ended()) and time.monotonic() < patience:
            look()
            time.sleep(_LOOK_SECONDS)
        self.how = how or f"its ranks did not end within {_LEAVE_SECONDS:g} s"
        return self._launch.status if how else LOST

    def _leave(self, how: str) -> None:
        """The ranks have ended: tell the engine, and wait until it has heard."""
        end = time.monotonic() + _HEARD_SECONDS
        while self._over is None and time.monotonic() < end:
            self._say(Ended(how))
            self._hear(_LOOK_SECONDS)

    def _hear(self, seconds: float) -> None:
        socket = self._bound.socket
        if not socket.poll(int(1000 * seconds)):
            return
        while socket.poll(0):
            who, *parts = socket.recv_multipart(copy=False)
            identity = who.bytes
            for said in unpack(joined(parts)):
                with contextlib.suppress(zmq.ZMQError):  # of no engine of ours
                    self._bound.know(parts[0])
                if isinstance(said, Meet) and self._engine in (None, identity) and self._launch is None:
                    self._meet(identity, said)
                elif identity == self._engine:
                    self._heard = time.monotonic()
                    self._obey(said)
                elif isinstance(said, Meet):
                    self._say(Dismissed("it works for another engine", busy=True), identity)

    def _meet(self, identity: bytes, said: Meet) -> None:
        post = self._post
        if (said.protocol, said.versions) != (PROTOCOL, self._versions):
            what = f"the engine has {_told(said.versions, said.protocol)}, the worker {_told(self._versions, PROTOCOL)}"
            self._refuse(identity, Dismissed(what, "install one version on all hosts"))
            return
        self._engine, self._heard = identity, time.monotonic()
        self._say(Met(post.role, post.tp, self._host, self._checkpoint, self._versions))

    def _refuse(self, identity: bytes, why: Dismissed) -> None:
        """Refuse an engine, and wait until it has heard, which it says."""
        self._engine, end = identity, time.monotonic() + _HEARD_SECONDS
        while self._over is None and time.monotonic() < end:
            self._say(why)
            self._hear(_LOOK_SECONDS)
        self._over = why

    def _obey(self, said: Said) -> None:
        if isinstance(said, Begin) and self._launch is None:
            more = {MODEL: str(self._post.model.resolve())}
            if self._post.key is not None:
                more[KEY] = str(self._post.key.resolve())
            self._launch = PaddleLaunch(self._post.tp, more=more)
            self._launch.start(said.url)
        elif isinstance(said, Beat):
            self._say(Beat())
        elif isinstance(said, Dismissed):
            self._over = said

    def _say(self, said: Said, whom: bytes | None = None) -> None:
        try:
            self._bound.send(whom or self._engine or b"", pack(said))
        except zmq.ZMQError:  # the engine is gone, which its silence tells
            return


def _told(versions: dict[str, str], protocol: int) -> str:
    return ", ".join([*(f"{name} {version}" for name, version in sorted(versions.items())), f"protocol {protocol}"])
