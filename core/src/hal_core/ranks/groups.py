"""Groups of a job's ranks, opened by all ranks in the same order, watched, and used for collectives.

Open groups belong to the process, as the libraries' own groups do; devices use them through their communicators.

    open_groups([(0, 1), (2, 3)], timeout=30.0)     # every rank of the job, the same call
"""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import GroupLost, HalError, InvalidValue
from ..timeouts import TIMEOUTS
from .channel import core_version
from .host_group import HOST, HostGroup
from .job import Job, join_job, own_host
from .peers import ENDPOINT, Endpoint, Listener, receive
from .shared_config import BLOCK_BYTES, SharedConfig, differences
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..group import Group

MOST_GROUPS = 256
"""Most groups in one call of :func:`open_groups`: their block has a fixed size."""
LIBRARIES = "hal.collectives"
"""The entry-point group of a :data:`Maker` for each library that a distribution offers, by the library's name."""
FORMER = {"gloo": HOST}
"""Names of libraries in version 1.1, accepted for one release."""

Share = Callable[[bytes], bytes]
"""Sends every member the bytes of the group's first rank; all ranks pass the same size."""


class OwnGroup(Protocol):
    """A group that a library made."""

    def abort(self) -> None:
        """End waiting calls, on the host and on the device. Called once, by the watchdog's thread."""

    def close(self) -> None:
        """Release the library's resources and leave the group. Also called after :meth:`abort`."""


Maker = Callable[[Sequence[int], int, Share, float], OwnGroup]
"""Creates a group from its ranks, this rank, a :data:`Share` and the timeout in seconds; all members call it together.
Raises :class:`GroupLost` if a rank does not come."""


class OpenGroup:
    """A group that this process has opened: its global ranks in rising order, its library's group, its watchdog."""

    def __init__(self, ranks: tuple[int, ...], process_group: Any, watchdog: Watchdog) -> None:  # noqa: ANN401
        self.ranks, self.process_group, self.watchdog = ranks, process_group, watchdog

    def watched(self, call: Callable[..., Any], *arguments: object) -> None:
        """Make a call of the library that returns when it is done. Raises :class:`GroupLost`, as every later call then
        does."""
        watchdog = self.watchdog
        watchdog.begin()
        try:
            call(*arguments)
        except Exception as error:  # libraries raise RuntimeError, ValueError or OSError
            raise watchdog.failed(error) from error
        watchdog.end()
        if watchdog.reason:
            raise watchdog.error(watchdog.reason)

    def close(self) -> None:
        """Send the members a goodbye, and release the library's resources. Idempotent."""
        self.watchdog.close()
        self.process_group.close()


_open: dict[tuple[str, tuple[int, ...]], OpenGroup] = {}
"""By library and ranks: a state's device may have a library of its own, and the model's tensors use another."""
_lock = threading.RLock()


def open_groups(
    groups: Sequence[Sequence[int]],
    *,
    backend: str = HOST,
    timeout: float | None = None,
    make: Maker | None = None,
) -> None:
    """Open groups of global ranks. Every rank of the job makes the same call, whether or not it is a member.

    ``backend``: the library's name, by default hal's own for host memory. ``make`` creates the groups over another;
    without it a distribution must offer that library in the entry-point group ``hal.collectives``, as paddle-hal-paddle
    does for those of Paddle's current device ("xccl", "bkcl", "nccl"). Over such a library the ranks of one group have
    a device each. ``timeout``: seconds that a collective may last before its group is given up; by default
    ``TIMEOUTS.collective``.

    Open groups stay open and take the new timeout; a group lost on any member is created again. Raises
    :class:`InvalidValue` on every rank, before any group is created, if the ranks' calls differ.
    """
    timeout = TIMEOUTS.collective if timeout is None else timeout
    backend = FORMER.get(backend, backend)
    if make is None and backend != HOST:
        make = _offered(backend)
    with _lock:
        job = join_job(timeout)
        wanted = list(dict.fromkeys(tuple(sorted(ranks)) for ranks in groups))
        with Listener(own_host()) as listener:
            endpoints, missing = _agree(backend, wanted, groups, job, listener, timeout)
            mine = [ranks for ranks in wanted if ranks in missing and job.rank in ranks]
            for ranks in mine:
                if (backend, ranks) in _open:
                    _open.pop((backend, ranks)).close()
            # hal's own library needs connections of its own for collectives, besides the watchdog's
            links = listener.meet(job.rank, mine * (1 if make else 2), endpoints, timeout)
            for at, ranks in enumerate(mine):
                if make is None:
                    own = {ranks.index(rank): link for rank, link in links[len(mine) + at].items()}
                    made: OwnGroup = HostGroup(ranks.index(job.rank), own)
                else:
                    made = _make_by(make, ranks, job.rank, links[at], timeout)
                _open[backend, ranks] = OpenGroup(ranks, made, Watchdog(job.rank, links[at], timeout, made.abort))
        for ranks in wanted:
            if job.rank in ranks and len(ranks) > 1:
                _open[backend, ranks].watchdog.timeout = timeout


def opened(group: Group, *, backend: str = HOST, timeout: float | None = None, make: Maker | None = None) -> OpenGroup:
    """Return the open group of these ranks. A group of all ranks of the job is opened here, as all of them call this.

    ``backend``, ``timeout`` and ``make``: those of :func:`open_groups`.
    """
    ranks, backend = tuple(sorted(group.ranks)), FORMER.get(backend, backend)
    with _lock:
        found = _open.get((backend, ranks))
        if found is not None:
            return found
        if len(ranks) == 1:
            raise InvalidValue(
                f"the group {group.ranks} has one rank", cure="make no collective call for it", argument="group"
            )
        if len(ranks) != join_job(timeout).size:
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


# -- opening ----------------------------------------------------------------------------------------------------


def _offered(backend: str) -> Maker:
    """Return the maker of groups over a library that an installed distribution offers."""
    for found in entry_points(group=LIBRARIES, name=backend):
        maker: Maker = found.load()
        return maker
    known = ", ".join(sorted({found.name for found in entry_points(group=LIBRARIES)})) or "none but hal's own"
    raise InvalidValue(
        f"no installed distribution offers groups over {backend!r} (offered: {known})",
        cure="install one (paddle-hal-paddle has those of Paddle: pip install ./plugins/paddle in hal's checkout)",
        argument="group",
    )


def _make_by(
    make: Maker, ranks: Sequence[int], me: int, links: Mapping[int, socket.socket], timeout: float
) -> OwnGroup:
    """Create a group by a library. If that raises, the connections are closed, so that no rank waits for this one."""

    def share(data: bytes) -> bytes:
        if me != ranks[0]:
            return receive(links[ranks[0]], len(data), max(timeout, TIMEOUTS.connecting))
        for link in links.values():
            link.sendall(data)
        return data

    try:
        return make(ranks, me, share, timeout)
    except Exception as error:
        for link in links.values():
            link.close()
        if isinstance(error, OSError) and not isinstance(error, HalError):
            raise GroupLost(
                f"rank {me} could not make the group {tuple(ranks)}: {error}",
                cure="check whether its ranks are running, and whether they can reach each other",
                argument="group",
            ) from error
        raise


def _agree(
    backend: str,
    wanted: Sequence[tuple[int, ...]],
    given: Sequence[Sequence[int]],
    job: Job,
    listener: Listener,
    timeout: float,
) -> tuple[dict[int, Endpoint], set[tuple[int, ...]]]:
    """Compare the groups to open on all ranks; return endpoints by rank, and the groups that must be created."""
    shared = SharedConfig.of(
        {
            "contract": f"paddle-hal-core {core_version()}",
            "library": backend,
            "groups": " ".join(str(tuple(ranks)) for ranks in given),
            "timeout": f"{timeout:g} s",
        }
    )
    alive = bytes(_is_sound(backend, ranks) for ranks in wanted)
    block = shared.block() + listener.endpoint.pack() + alive[:MOST_GROUPS].ljust(MOST_GROUPS, b"\0")
    blocks = job.exchange(block, max(timeout, TIMEOUTS.collective))
    found = differences({rank: data[:BLOCK_BYTES] for rank, data in blocks.items()})
    if found:
        raise InvalidValue(
            "the ranks do not open the same groups: " + "; ".join(found),
            cure="call open_groups with the same arguments on every rank",
            argument="groups",
        )
    _check_groups(wanted, job.size)  # checked only now, so that all ranks come here
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
        what = f"{len(wanted)} groups, but at most {MOST_GROUPS} can be opened at once"
        raise InvalidValue(what, cure="open them by several calls", argument="groups")


atexit.register(close_groups)
