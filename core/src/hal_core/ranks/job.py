"""The job of this process: meeting its other ranks, and exchanging blocks of bytes with them.

The environment describes a job by the variables that Paddle's launcher sets and :mod:`hal`'s starters set alike:
``PADDLE_TRAINER_ID`` (this rank), ``PADDLE_TRAINERS_NUM``, ``PADDLE_TRAINER_ENDPOINTS`` (each rank's ``host:port``,
separated by commas) and ``PADDLE_CURRENT_ENDPOINT``. The first rank listens at its endpoint until all others have come,
and each keeps its connection with the first. No framework takes part.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic

from ..errors import GroupLost, InvalidValue
from ..timeouts import TIMEOUTS
from .peers import receive

HELLO = struct.Struct("<8s16sI")
"""Magic, the digest of the job's endpoints, and the rank that connects."""
MAGIC = b"HALJOB1\0"
COUNT = struct.Struct("<I")
"""The bytes of a block; :data:`FAILED` and the reason's bytes if the exchange failed."""
FAILED = 1 << 31
_VARIABLES = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")


@dataclass(slots=True)
class Job:
    """A job that this process has joined: its global rank, the number of ranks, and its connections by rank (with the
    first rank; of the first, with all others)."""

    rank: int
    size: int
    links: Mapping[int, socket.socket]
    lost: str = field(default="")
    """Why blocks can no longer be exchanged, or "" while they can."""

    def exchange(self, block: bytes, timeout: float) -> dict[int, bytes]:
        """Return every rank's block, by global rank. All ranks call this, with blocks of one size.

        Raises :class:`GroupLost` on every rank if one does not come within ``timeout`` seconds, and then for good.
        """
        if self.lost:
            raise self._error()
        deadline = monotonic() + timeout
        with self._failing():
            return self._collect(block, deadline) if self.rank == 0 else self._ask(block, deadline)

    def _collect(self, block: bytes, deadline: float) -> dict[int, bytes]:
        """Of the first rank: receive all blocks, and send all of them to each other rank."""
        found = {0: block}
        try:
            for rank, link in self.links.items():
                (count,) = COUNT.unpack(_take(link, rank, COUNT.size, deadline))
                if count != len(block):
                    raise ConnectionError(f"rank {rank} sent {count} bytes, but this rank {len(block)}")
                found[rank] = _take(link, rank, count, deadline)
        except OSError as error:
            reason = str(error).encode()
            for link in self.links.values():
                with contextlib.suppress(OSError):  # that rank may be the one that is lost
                    link.sendall(COUNT.pack(FAILED | len(reason)) + reason)
            raise
        together = b"".join(found[rank] for rank in range(self.size))
        for link in self.links.values():
            _put(link, COUNT.pack(len(together)) + together, deadline)
        return found

    def _ask(self, block: bytes, deadline: float) -> dict[int, bytes]:
        """Of another rank: send the block, and receive all of them.

        The first rank waits until the same deadline, and then sends which rank did not come. That message is waited for
        a little longer.
        """
        link = self.links[0]
        _put(link, COUNT.pack(len(block)) + block, deadline)
        deadline += TIMEOUTS.loss_reason
        (count,) = COUNT.unpack(_take(link, 0, COUNT.size, deadline))
        if count & FAILED:
            raise ConnectionError(_take(link, 0, count & ~FAILED, deadline).decode())
        together = _take(link, 0, count, deadline)
        return {rank: together[rank * len(block) : (rank + 1) * len(block)] for rank in range(self.size)}

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn the failure of a connection into the loss of the job: the other ranks may be at another exchange."""
        try:
            yield
        except OSError as error:
            self.lost = str(error)
            raise self._error() from error

    def _error(self) -> GroupLost:
        return GroupLost(
            f"rank {self.rank} can reach the job's ranks no longer: {self.lost}",
            cure="end all ranks, and start them again",
            argument="group",
        )


_joined: Job | None = None
_lock = threading.Lock()


def join_job(timeout: float | None = None) -> Job:
    """Join the job that the environment describes, and return it once all its ranks have come. Idempotent.

    ``timeout``: seconds that the first rank may take to listen; by default ``TIMEOUTS.collective``. From then on the
    ranks may take ``TIMEOUTS.starting``, or ``timeout`` if that is longer.
    """
    global _joined
    timeout = TIMEOUTS.collective if timeout is None else timeout
    with _lock:
        if _joined is None:
            _joined = _join(timeout)
        return _joined


def join_world(*, backend: str = "", timeout: float | None = None) -> tuple[int, int]:
    """Join the job that the environment describes; return ``(global rank, ranks)``. Idempotent.

    ``backend`` is without effect: joining needs no library. ``timeout``: that of :func:`join_job`.
    """
    job = join_job(timeout)
    return job.rank, job.size


def own_host() -> str:
    """Return the address of this rank's host at which the other ranks reach it."""
    host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0].strip("[]")
    if ":" in host:  # an address of IPv6, which gethostbyname refuses
        return host
    return socket.gethostbyname(host) if host else "127.0.0.1"


def wait_for_listener(host: str, port: int, timeout: float, rank: int) -> socket.socket:
    """Return a connection with a rank, once it listens. Raises :class:`GroupLost` after ``timeout`` seconds."""
    deadline = monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            return socket.create_connection((host, port), max(0.001, deadline - monotonic()))
        except OSError as error:
            if monotonic() > deadline:
                raise GroupLost(
                    f"rank {rank} did not listen at {host}:{port} within {timeout:g} s: {error}",
                    cure="check whether the rank was started, and the first address of PADDLE_TRAINER_ENDPOINTS",
                    argument="group",
                ) from error
        pause.wait(TIMEOUTS.pause)


def _join(timeout: float) -> Job:
    absent = [name for name in _VARIABLES if not os.environ.get(name)]
    if absent:
        raise InvalidValue(
            f"this process is not a rank of a job: {', '.join(absent)} not set",
            cure="start the ranks with hal run or python -m paddle.distributed.launch, or set these variables",
            argument="group",
        )
    rank, size, endpoints, _ = (os.environ[name] for name in _VARIABLES)
    host, _, port = endpoints.split(",")[0].rpartition(":")
    try:
        me, ranks, address = int(rank), int(size), (host.strip("[]"), int(port))
    except ValueError:
        raise InvalidValue(
            f"no job is described by {', '.join(f'{name}={os.environ[name]!r}' for name in _VARIABLES[:3])}",
            cure="give a rank and a number of ranks, and each rank's host:port, separated by commas",
            argument="group",
        ) from None
    hello = HELLO.pack(MAGIC, hashlib.sha256(f"{ranks} {endpoints}".encode()).digest()[:16], me)
    longer = max(timeout, TIMEOUTS.starting)
    if me == 0:
        return Job(me, ranks, _meet_all(address, hello, ranks, longer))
    link = wait_for_listener(*address, timeout, 0)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _put(link, hello, monotonic() + longer)
        _take(link, 0, len(MAGIC), monotonic() + longer)  # sent when all have come
    except OSError as error:
        link.close()
        raise GroupLost(
            f"rank {me} came to {host}:{port}, but the job did not begin: {error}",
            cure="check whether all ranks are running, and whether they were given the same addresses",
            argument="group",
        ) from error
    return Job(me, ranks, {0: link})


def _meet_all(address: tuple[str, int], hello: bytes, size: int, timeout: float) -> dict[int, socket.socket]:
    """Of the first rank: return the connections with all others, once they have come. Strangers are turned away."""
    links: dict[int, socket.socket] = {}
    if size == 1:
        return links
    deadline, expected = monotonic() + timeout, HELLO.unpack(hello)[:2]
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listener = socket.create_server(address, family=family, backlog=size)
    except OSError as error:
        raise InvalidValue(
            f"the first rank cannot listen at {address[0]}:{address[1]}: {error}",
            cure="give a free port of its host as the first address of PADDLE_TRAINER_ENDPOINTS",
            argument="group",
        ) from error
    with listener:
        while len(links) < size - 1:
            listener.settimeout(max(0.001, deadline - monotonic()))
            try:
                link, _ = listener.accept()
            except OSError as error:
                for link in links.values():
                    link.close()
                missing = sorted({*range(1, size)} - links.keys())
                raise GroupLost(
                    f"rank(s) {missing} did not come to the job within {timeout:g} s",
                    cure="check whether these ranks are running",
                    argument="group",
                ) from error
            rank = _greeted(link, expected, deadline)
            if 0 < rank < size and rank not in links:
                links[rank] = link
            else:
                link.close()
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):  # the loss of a rank is found by the first exchange, and named
            link.sendall(MAGIC)
    return dict(sorted(links.items()))


def _greeted(link: socket.socket, expected: tuple[object, ...], deadline: float) -> int:
    """Return the rank that has connected, or -1 for a stranger."""
    try:
        *found, rank = HELLO.unpack(receive(link, HELLO.size, min(1.0, deadline - monotonic())))
    except OSError:
        return -1
    return int(rank) if tuple(found) == expected else -1


def _take(link: socket.socket, rank: int, count: int, deadline: float) -> bytes:
    try:
        return receive(link, count, deadline - monotonic())
    except TimeoutError:
        raise TimeoutError(f"rank {rank} did not come in time") from None
    except OSError as error:
        raise ConnectionError(f"rank {rank} has ended ({error})") from error


def _put(link: socket.socket, data: bytes, deadline: float) -> None:
    link.settimeout(max(0.001, deadline - monotonic()))
    link.sendall(data)
