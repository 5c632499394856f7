"""Workers that were started by themselves, on any host, and the engine that connects to them (``hal run --workers``).

The worker listens (``hal worker --listen URL``), the engine connects, asks what it is, and has it start its ranks:

engine                                  worker
Meet     (who asks)          ─────────>
         <─────────────────────────────  Met    (role, tp, host, checkpoint, versions), or Dismissed
Begin    (where ranks come to) ───────>  starts its ranks, as an engine on its host would
Beat     (still there)       ─────────>
         <─────────────────────────────  Beat, Ended (how its ranks have ended)
Dismissed (refused, or over) ─────────>  ends

Over tcp all of it is encrypted, with one pair of keys for engine, workers and ranks (:func:`job_keys`): who has the
file is let in.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec
import zmq
from hal_core import FrameError, InvalidValue, Unavailable
from hal_core.frames import FrameKind, new_session, read_body, seal, split

from hal.transport.connection import Connection
from hal.transport.curve import CurveKeys
from hal.transport.urls import is_loopback, scheme_of

from .lines import BEAT_SECONDS, SILENCE
from .words import PROTOCOL

_WHOSE_KEY = "hal worker, or hal tail, makes it; copy it to the other hosts"
MEETING = 30.0
"""Seconds in which a worker must answer an engine that connects."""


class _Said(msgspec.Struct, tag=True):
    pass


class Meet(_Said):
    """An engine is there; ``protocol`` and ``versions`` must be the worker's."""

    versions: dict[str, str]
    protocol: int = PROTOCOL


class Met(_Said):
    """What the worker is: its role's name, ranks, the host where these can be reached ("" within one), and the digest
    of its checkpoint."""

    role: str
    tp: int
    host: str
    checkpoint: str
    versions: dict[str, str]
    protocol: int = PROTOCOL


class Begin(_Said):
    """Start the ranks; they find the engine at ``url``."""

    url: str


class Beat(_Said):
    """Still there."""


class Ended(_Said):
    """The ranks have ended: how, in words."""

    how: str


class Dismissed(_Said):
    """Nothing more comes; ``what`` says why, where something was refused. ``busy``: by a worker that has an engine."""

    what: str = ""
    cure: str = ""
    busy: bool = False


Said: TypeAlias = Meet | Met | Begin | Beat | Ended | Dismissed
_Wanted = TypeVar("_Wanted", Met, Ended)
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Said)


def pack(said: Said, session: int = 1) -> bytes:
    """As a frame."""
    return seal(FrameKind.WORD, _encoder.encode(said), session=session, sender=0, sequence=0)


def unpack(message: bytes | memoryview) -> list[Said]:
    """What a message says; nothing, where it is another's."""
    found: list[Said] = []
    with contextlib.suppress(FrameError, msgspec.MsgspecError, ValueError, RecursionError):
        found += [_decoder.decode(read_body(header, frame)) for header, frame in split(message)]
    return found


def job_keys(url: str, file: Path | None, *, make: bool = False) -> CurveKeys | None:
    """The keys of a job whose workers listen at addresses like ``url``; None within one host.

    ``make``: make the file if there is none. Raises :class:`InvalidValue` for tcp without a file, ipc with one, and a
    file that cannot be read, that others may read, or that holds no key.
    """
    if scheme_of(url) != "tcp":
        if file is not None:
            raise InvalidValue(f"{url!r} is private by its folder", cure="leave it out", argument="--key")
        return None
    if file is None:
        cure = "give --key FILE, the same file to hal run and every hal worker; hal worker makes one"
        raise InvalidValue(f"{url!r} goes over the network, and there is no key", cure=cure, argument="--key")
    try:
        if make and not file.parent.is_dir():
            cure = f"make it, or name another file ({_WHOSE_KEY})"
            raise InvalidValue(f"there is no folder {file.parent}", cure=cure, argument="--key")
        if file.is_dir():
            raise InvalidValue(f"{file} is a folder", cure=f"name a file in it ({_WHOSE_KEY})", argument="--key")
        if file.exists() and not file.is_file():  # a pipe, which may be read for ever
            raise InvalidValue(f"{file} is no regular file", cure=f"name another ({_WHOSE_KEY})", argument="--key")
        if make and not file.exists():
            _make_key(file)
        if file.is_file() and stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise InvalidValue(f"others may read {file}", cure=f"chmod 600 {file}", argument="--key")
        return CurveKeys.shared(file.read_text(encoding="ascii").strip())
    except (OSError, ValueError, zmq.ZMQError) as error:
        if isinstance(error, InvalidValue):
            raise
        what = f"{file} is no key: {getattr(error, 'strerror', None) or error}"
        raise InvalidValue(what, cure=f"give another file ({_WHOSE_KEY})", argument="--key") from error


def record_keys(url: str, file: Path | None, *, make: bool = False) -> CurveKeys | None:
    """Return the keys with which records travel to ``url``; None without a file, within one host. Raises as
    :func:`job_keys`."""
    if file is None and (scheme_of(url) != "tcp" or is_loopback(url)):
        return None
    if file is None:
        cure = "give --key FILE, the same file to hal run --sink and hal tail, which makes one"
        raise InvalidValue(f"{url!r} goes over the network, and there is no key", cure=cure, argument="--key")
    return job_keys(url, file, make=make)


def _make_key(file: Path) -> None:
    """Write a new key, unless another worker does so at the same time, whose key it is then: whole or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)  # which nobody else may read
    try:
        with open(descriptor, "w") as made:
            made.write(CurveKeys.new().secret + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)


class RemoteWorker:
    """The engine's end of a worker: a :class:`hal.distributed.launch.Starter` of its ranks. One thread uses it."""

    def __init__(self, url: str, keys: CurveKeys | None) -> None:
        """Begin to connect. Raises :class:`InvalidValue` for an address that makes no sense."""
        self.url = url
        self._never, self._pipe = os.pipe()
        try:
            self._line = Connection(url, new_session(), keys, self._never)
        except BaseException:
            os.close(self._pipe)
            os.close(self._never)
            raise
        self._heard = time.monotonic()
        self._next_beat = 0.0
        self._how = ""
        self._met: Met | None = None
        self._closed = False

    def meet(self, versions: dict[str, str], timeout: float, look: Callable[[], None] = lambda: None) -> Met:
        """Ask what it is. Raises :class:`Unavailable` where nobody answers in time, and :class:`InvalidValue` where the
        worker refuses."""
        end, said = time.monotonic() + timeout, False
        while self._met is None:
            look()
            said = said or self._say(Meet(versions))
            self._hear(min(0.05, max(0.0, end - time.monotonic())))
            if self._how:
                raise InvalidValue(f"the worker at {self.url}: {self._how}", cure="start it anew", argument="--workers")
            if time.monotonic() > end:
                cure = "see whether it runs and was given the same --key, and whether a firewall stands between"
                what = f"no hal worker answers at {self.url} within {timeout:g} s: {_reached(self.url)}"
                raise Unavailable(what, cure=cure, argument="--workers")
        self._heard = time.monotonic()
        return self._met

    def own_address(self) -> str:
        """This host's own address as the worker's host sees it; "" within one host. Raises :class:`Unavailable` where
        no way leads there."""
        if scheme_of(self.url) != "tcp":
            return ""
        host, _, port = self.url.partition("://")[2].rpartition(":")
        try:
            family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket: nothing is sent
                own = str(probe.getsockname()[0])
        except OSError as error:
            what = f"no address of this host leads to the worker at {self.url}: {error.strerror or error}"
            raise Unavailable(what, cure="see what became of the network between them", argument="--workers") from error
        return f"[{own}]" if ":" in own else own

    def start(self, url: str) -> None:
        """See :class:`hal.distributed.launch.Starter`."""
        self._heard = time.monotonic()
        if not self._say(Begin(url)):
            what, cure = f"the worker at {self.url} takes no messages any more", "see what it says, and start it anew"
            raise Unavailable(what, cure=cure, argument="--workers")

    def ended(self) -> str:
        """See :class:`hal.distributed.launch.Starter`. To be called now and then: it says that the engine is there."""
        if self._closed or self._how:
            return self._how
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._say(Beat())
        self._hear(0.0)
        if not self._how and now - self._heard > SILENCE:
            self._how = f"nothing was heard of the worker at {self.url} for {SILENCE:g} s"
        return self._how

    def end(self, patience: float) -> None:
        """See :class:`hal.distributed.launch.Starter`."""
        end = time.monotonic() + patience
        while not self._closed and not self.ended() and time.monotonic() < end:
            self._hear(min(0.05, patience))
        self.dismiss()

    def dismiss(self, what: str = "", cure: str = "") -> None:
        """Send it away, with what was refused. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._say(Dismissed(what, cure))
        self._line.close(1000 if self._met is not None else 0)
        self._line.end()
        os.close(self._pipe)
        os.close(self._never)

    def _say(self, said: Said) -> bool:
        self._line.follow()
        return self._line.send(pack(said))

    def _hear(self, seconds: float) -> None:
        """Take what has come, or comes within so many seconds."""
        self._line.follow()
        if seconds:
            self._line.wait(time.monotonic() + seconds, due=False)
        with contextlib.suppress(zmq.Again):
            while True:
                for said in unpack(self._line.receive()):
                    self._heard = time.monotonic()
                    if isinstance(said, Met):
                        self._met = said
                    elif isinstance(said, Ended):
                        self._how = f"the worker at {self.url}: {said.how}"
                    elif isinstance(said, Dismissed):
                        self._refused(said)

    def _refused(self, said: Dismissed) -> None:
        self._how = said.what + (f" ({said.cure})" if said.cure else "")


def _reached(url: str) -> str:
    """What can be found at the address, for the error."""
    if scheme_of(url) != "tcp":
        return "nobody listens there"
    host, _, port = url.partition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1.0):
            return "something listens there, but understands nothing under this key"
    except OSError as error:
        return f"it cannot be reached: {error.strerror or error}"
