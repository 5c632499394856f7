"""Process groups over ``paddle.distributed``, opened by all ranks in the same order, watched, and used for broadcasts.

Paddle is imported when a group is opened, not before. Open groups belong to the process, as Paddle's own groups do;
devices use them through :class:`PaddleCommunicator`.

    open_groups([(0, 1), (2, 3)], timeout=30.0)     # every rank of the job, the same call
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....errors import InvalidValue
from ....ranks.channel import contract_version
from ....ranks.peers import ENDPOINT, Endpoint, Listener
from ....ranks.shared_config import BLOCK_BYTES, SharedConfig, differences
from ....ranks.watchdog import Watchdog
from ....tickets import DONE, Ticket
from ....timeouts import TIMEOUTS
from .direct_group import DirectGroup
from .job import distributed, exchange_blocks, join_world
from .process_groups import Maker, make_by, make_group

if TYPE_CHECKING:
    from ....group import Group
    from ....memory.views import ByteRange, Memory
    from ....streams import Stream

MOST_GROUPS = 256
"""Most groups in one call of :func:`open_groups`: their block has a fixed size."""

TensorOf = Callable[["Memory", "ByteRange"], Any]


class OpenGroup:
    """A group that this process has opened: its global ranks in rising order, its process group (Paddle's or a
    device's), its watchdog.

    ``keep`` lives as long as the group does; its ``close``, if any, is called when the group is closed.
    """

    def __init__(self, ranks: tuple[int, ...], process_group: Any, watchdog: Watchdog, keep: object) -> None:  # noqa: ANN401
        self.ranks, self.process_group, self.watchdog, self.keep = ranks, process_group, watchdog, keep

    def start(self, tensor: Any, source: int) -> None:  # noqa: ANN401 (a Paddle tensor)
        """Start a broadcast in place, from a global rank, on the current stream; the caller waits for its end."""
        # wait() makes the current stream, and not the host, wait for the library's own stream.
        self.process_group.broadcast(tensor, self.ranks.index(source), True).wait()

    def broadcast(self, tensor: Any, source: int) -> None:  # noqa: ANN401 (a Paddle tensor)
        """Broadcast in place from a global rank. Raises :class:`GroupLost` for this and every later call."""
        # The call that paddle.distributed.broadcast makes after checks that cost 10 us; over gloo it returns when done.
        self.watched(self.process_group.broadcast, tensor, self.ranks.index(source), True)

    def watched(self, call: Callable[..., Any], *arguments: object) -> None:
        """Make a call of the process group that returns when it is done. Raises :class:`GroupLost`, as every later call
        then does."""
        watchdog = self.watchdog
        watchdog.begin()
        try:
            call(*arguments)
        except Exception as error:  # gloo raises RuntimeError, ValueError or OSError
            raise watchdog.failed(error) from error
        watchdog.end()
        if watchdog.reason:
            raise watchdog.error(watchdog.reason)

    def close(self) -> None:
        """Send the members a goodbye, and release the library's resources. Idempotent."""
        self.watchdog.close()
        getattr(self.keep, "close", _nothing)()


def _nothing() -> None:
    """Do nothing, as Paddle's groups end with the process."""


_open: dict[tuple[str, tuple[int, ...]], OpenGroup] = {}
"""By library and ranks: a state's device may have a library of its own, and the model's tensors use another."""
_lock = threading.RLock()


def open_groups(
    groups: Sequence[Sequence[int]],
    *,
    backend: str = "gloo",
    timeout: float | None = None,
    make: Maker | None = None,
) -> None:
    """Open groups of global ranks. Every rank of the job makes the same call, whether or not it is a member.

    ``backend``: "gloo", or the library of Paddle's current device ("xccl", "bkcl", "nccl"). The job itself may be
    joined over another (``PADDLE_DISTRI_BACKEND``): over gloo it may contain ranks that share a GPU, as long as the
    ranks of one group have a GPU each. ``make`` creates the groups in place of Paddle, which then only joins the job;
    all ranks give it, and ``backend`` names its library. ``timeout``: seconds that a collective may last before its
    group is given up; by default ``TIMEOUTS.collective``.

    Open groups stay open and take the new timeout; a group lost on any member is created again. Raises
    :class:`InvalidValue` on every rank, before any group is created, if the ranks' calls differ.
    """
    timeout = TIMEOUTS.collective if timeout is None else timeout
    with _lock:
        me, size = join_world(backend="gloo" if make else backend, timeout=timeout)
        wanted = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in groups))
        host = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")[0].strip("[]")
        with Listener(socket.gethostbyname(host) if host else "127.0.0.1") as listener:
            endpoints, missing = _agree(backend, wanted, groups, me, size, listener, timeout)
            mine = [ranks for ranks in wanted if ranks in missing and me in ranks]
            for ranks in mine:
                if (backend, ranks) in _open:
                    _open.pop((backend, ranks)).close()
            is_gloo = backend == "gloo" and make is None
            links = listener.meet(me, mine * (1 + is_gloo), endpoints, timeout)
            for at, ranks in enumerate(mine):
                peers = links[at]
                if make is not None:
                    made = keep = make_by(make, ranks, me, peers, timeout)
                    abort = made.abort
                else:
                    made, abort, keep = make_group(backend, ranks, me, endpoints, peers, timeout)
                if is_gloo:
                    direct = {ranks.index(rank): link for rank, link in links[len(mine) + at].items()}
                    made = keep = DirectGroup(made, ranks.index(me), direct, abort, keep)
                    abort = made.abort
                _open[backend, ranks] = OpenGroup(ranks, made, Watchdog(me, peers, timeout, abort), keep)
        for ranks in wanted:
            if me in ranks and len(ranks) > 1:
                _open[backend, ranks].watchdog.timeout = timeout


def opened(
    group: Group, *, backend: str = "gloo", timeout: float | None = None, make: Maker | None = None
) -> OpenGroup:
    """Return the open group of these ranks. A group of all ranks of the job is opened here, as all of them call this.

    ``backend``, ``timeout`` and ``make``: those of :func:`open_groups`.
    """
    ranks = tuple(sorted(group.ranks))
    with _lock:
        found = _open.get((backend, ranks))
        if found is not None:
            return found
        if len(ranks) != join_world(backend="gloo" if make else backend, timeout=timeout)[1]:
            raise InvalidValue(
                f"the group {group.ranks} is not open",
                cure="call hal_core.devices.open_groups with all groups of the job, on every rank, first",
                argument="group",
            )
        open_groups([ranks], backend=backend, timeout=timeout, make=make)
        return _open[backend, ranks]


def close_groups() -> None:
    """Send a goodbye to the members of every open group, and end the watchdogs. Idempotent."""
    with _lock:
        while _open:
            _open.popitem()[1].close()


class PaddleCommunicator:
    """One group's collectives on the memory of one device; see :class:`hal_core.ranks.communicator.Communicator`.

    ``tensor_of(memory, part)`` returns a Paddle tensor, uint8, that shares the bytes; it is called once for each.
    """

    def __init__(self, group: Group, open_group: OpenGroup, tensor_of: TensorOf) -> None:
        self.group, self._open = group, open_group
        self._tensor_of, self._source = tensor_of, group.source
        self._tensors: weakref.WeakKeyDictionary[Memory, dict[ByteRange, Any]] = weakref.WeakKeyDictionary()
        self._last: tuple[weakref.ref[Memory], ByteRange, Any] | None = None

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Make ``part`` of ``memory`` equal to that of the group's first rank, in one collective, in place."""
        self._open.broadcast(self._tensor(memory, part), self._source)
        return DONE

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return every rank's block, by global rank: one broadcast of fixed size from each rank in turn."""
        return exchange_blocks(block, self.group.rank, self._open.ranks, self._open.broadcast)

    def close(self) -> None:
        """Forget the tensors; the group stays open for the process (:func:`close_groups`)."""
        self._tensors.clear()
        self._last = None

    def _tensor(self, memory: Memory, part: ByteRange) -> Any:  # noqa: ANN401 (a Paddle tensor)
        last = self._last  # usually the same as before; a lookup in the weak dictionary takes 1 us
        if last is not None and last[0]() is memory and last[1] is part:
            return last[2]
        tensors = self._tensors.setdefault(memory, {})
        if part not in tensors:
            tensors[part] = self._tensor_of(memory, part)
        self._last = weakref.ref(memory), part, tensors[part]
        return tensors[part]


# -- opening ----------------------------------------------------------------------------------------------------


def _agree(
    backend: str,
    wanted: Sequence[tuple[int, ...]],
    given: Sequence[Sequence[int]],
    me: int,
    size: int,
    listener: Listener,
    timeout: float,
) -> tuple[dict[int, Endpoint], set[tuple[int, ...]]]:
    """Compare the groups to open on all ranks; return endpoints by rank, and the groups that must be created."""
    dist = distributed()
    shared = SharedConfig.of(
        {
            "contract": f"paddle-hal-core {contract_version()}",
            "library": backend,
            "groups": " ".join(str(tuple(ranks)) for ranks in given),
            "timeout": f"{timeout:g} s",
        }
    )
    alive = bytes(_is_sound(backend, ranks) for ranks in wanted)
    block = shared.block() + listener.endpoint.pack() + alive[:MOST_GROUPS].ljust(MOST_GROUPS, b"\0")
    blocks = exchange_blocks(block, me, range(size), lambda tensor, rank: dist.broadcast(tensor, rank) and None)
    found = differences({rank: data[:BLOCK_BYTES] for rank, data in blocks.items()})
    if found:
        raise InvalidValue(
            "the ranks do not open the same groups: " + "; ".join(found),
            cure="call open_groups with the same arguments on every rank",
            argument="groups",
        )
    _check_groups(wanted, size)  # checked only now, so that all ranks come here
    end = BLOCK_BYTES + ENDPOINT.size
    endpoints = {rank: Endpoint.unpack(data[BLOCK_BYTES:end]) for rank, data in blocks.items()}
    missing = {
        ranks for at, ranks in enumerate(wanted) if len(ranks) > 1 and not all(blocks[rank][end + at] for rank in ranks)
    }
    return endpoints, missing


def _is_sound(backend: str, ranks: tuple[int, ...]) -> bool:
    """Return whether this process has the group, and it was not given up."""
    found = _open.get((backend, ranks))
    return found is not None and not found.watchdog.reason


def _check_groups(wanted: Sequence[tuple[int, ...]], size: int) -> None:
    for group in wanted:
        if not group or group[0] < 0 or group[-1] >= size or len(set(group)) != len(group):
            raise InvalidValue(
                f"invalid group {group} for a job of {size} ranks",
                cure=f"give distinct global ranks from 0 to {size - 1}",
                argument="groups",
            )
    if len(wanted) > MOST_GROUPS:
        raise InvalidValue(f"{len(wanted)} groups, but at most {MOST_GROUPS} can be opened at once", argument="groups")


atexit.register(close_groups)
