"""Paddle's process groups, each created only by its members, with its own store.

``paddle.distributed.new_group`` makes every group of a job publish its addresses in one store under the same keys. A
rank sometimes reads those of an older group and then fails to connect, or waits without end. Here each group gets its
own store, served by its first rank, and only members take part.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np

from ....errors import GroupLost, HalError, InvalidValue
from ....ranks.peers import Endpoint, receive
from ....ranks.ports import HeldPort
from ....timeouts import TIMEOUTS
from ..places import paddle_core
from .gloo_sockets import GlooSockets
from .job import wait_for_listener

WHERE = struct.Struct("<II")
"""Port of a group's store, and Paddle's number of the group."""

Made = tuple[Any, Callable[[], None]]
"""A process group, and a function that ends a waiting call."""

Share = Callable[[bytes], bytes]
"""Sends every member the bytes of the group's first rank; all ranks pass the same size."""


class OwnGroup(Protocol):
    """A group that a device created with its own library."""

    def abort(self) -> None:
        """End waiting calls, on the host and on the device. Called once, by the watchdog's thread."""

    def close(self) -> None:
        """Release the library's resources and leave the group. Also called after :meth:`abort`."""


Maker = Callable[[Sequence[int], int, Share, float], OwnGroup]
"""Creates a group from its ranks, this rank, a :data:`Share` and the timeout in seconds; all members call it together.
Raises :class:`GroupLost` if a rank does not come."""


def make_group(
    backend: str,
    ranks: Sequence[int],
    me: int,
    endpoints: Mapping[int, Endpoint],
    links: Mapping[int, socket.socket],
    timeout: float,
) -> tuple[Any, Callable[[], None], Any]:
    """Create the group of these ranks together with its members; return Paddle's process group, its abort function and
    its store.

    ``links`` are the connections with the other members. Raises :class:`GroupLost` if a rank does not come.
    """
    if backend == "nccl":
        timeout = max(timeout, TIMEOUTS.connecting)
    core, create = paddle_core(), _creator(backend, timeout)
    host, first = endpoints[ranks[0]].host, me == ranks[0]
    held = HeldPort(host) if first else contextlib.nullcontext(None)
    try:
        with held as port_here:  # held until the store binds it: Paddle ends the process if the port is in use
            if port_here is not None:
                port, number = port_here.number, int.from_bytes(os.urandom(4), "little") % (1 << 30) + (1 << 30)
                for link in links.values():
                    link.sendall(WHERE.pack(port, number))
            else:
                port, number = WHERE.unpack(receive(links[ranks[0]], WHERE.size, timeout))
                wait_for_listener(host, port, timeout, ranks[0])
            store = core.TCPStore(host, port, first, len(ranks), max(1, round(timeout)))
        group, abort = create(store, list(ranks).index(me), len(ranks), number)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, HalError):
            raise
        raise GroupLost(
            f"rank {me} could not make the group {tuple(ranks)}: {error}",
            cure="check whether its ranks are running, and whether they can reach each other",
            argument="group",
        ) from error
    return group, abort, store


def make_by(make: Maker, ranks: Sequence[int], me: int, links: Mapping[int, socket.socket], timeout: float) -> OwnGroup:
    """Create a group with a device's library. If that raises, the connections are closed, so that no rank waits for
    this one."""

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
                cure="check whether its ranks are running",
                argument="group",
            ) from error
        raise


def _creator(backend: str, timeout: float) -> Callable[[Any, int, int, int], Made]:
    """Return a function that creates a group over this library, from a store, the rank within the group, its size, and
    a number."""
    core = paddle_core()

    def gloo(store: Any, rank: int, size: int, number: int) -> Made:  # noqa: ANN401 (a Paddle store)
        with GlooSockets() as sockets:
            group = core.ProcessGroupGloo.create(store, rank, size, number)
        return group, sockets.shut_down

    def xccl(store: Any, rank: int, size: int, number: int) -> Made:  # noqa: ANN401
        import paddle

        kind = str(paddle.get_device()).partition(":")[0]
        return core.ProcessGroupCustom.create(store, kind, rank, size, number), _nothing

    def bkcl(store: Any, rank: int, size: int, number: int) -> Made:  # noqa: ANN401
        return core.ProcessGroupBKCL.create(store, rank, size, number), _nothing

    def nccl(store: Any, rank: int, size: int, number: int) -> Made:  # noqa: ANN401
        place = _current_gpu()
        # As Paddle itself does before it uses NCCL; otherwise a group's communicator has no stream.
        core.CommContextManager.set_device_id(place.get_device_id())
        group = _by_paddle("nccl", store, rank, size, number)
        connect(group, place, timeout)
        return group, _nothing

    known = {"gloo": gloo, "xccl": xccl, "bkcl": bkcl, "nccl": nccl}
    if backend not in known:
        raise InvalidValue(
            f"process groups over {backend!r} are not supported", cure=f"known: {', '.join(known)}", argument="group"
        )
    return known[backend]


def _nothing() -> None:
    """Do nothing: device libraries cannot be aborted. Their watchdog reports to the caller, and the process must
    end."""


def _by_paddle(backend: str, store: Any, rank: int, size: int, number: int) -> Any:  # noqa: ANN401 (a store; a group)
    """Create the group through Paddle's own Python, which passes the arguments that its version takes.

    ``ProcessGroupNCCL.create`` takes five arguments in Paddle 2.6 and seven in 3.3.
    """
    from paddle.distributed.collective import _new_process_group_impl

    return _new_process_group_impl(backend, store, rank, size, f"hal-{number}", pg_options=None, group_id=number)


def _current_gpu() -> Any:  # noqa: ANN401 (a Paddle place)
    """Return the place of Paddle's current device, which must be a GPU."""
    from paddle.framework import _current_expected_place

    place = _current_expected_place()
    if not isinstance(place, paddle_core().CUDAPlace):
        raise InvalidValue(
            f"a group over nccl needs a GPU, but Paddle's current place is {place}",
            cure="call paddle.set_device('gpu:N') first, in each rank with a GPU of its own",
            argument="group",
        )
    return place


def connect(group: Any, place: Any, timeout: float) -> None:  # noqa: ANN401 (a Paddle process group; a place)
    """Make the first collective of a group whose library connects the ranks only then: now, while all ranks are
    present.

    The library waits for a missing rank without end and cannot be aborted. So a thread makes the call. After
    ``timeout`` seconds :class:`GroupLost` is raised and the thread remains: the process must end.
    """
    import paddle

    tensor, told, deadline = paddle.to_tensor(np.zeros(8, np.uint8), place=place), [], monotonic() + timeout

    def call() -> None:
        try:
            told.append(group.broadcast(tensor, 0, True))
        except BaseException as error:  # noqa: BLE001 (raised by the caller of connect)
            told.append(error)

    thread = threading.Thread(target=call, name="hal-connect", daemon=True)
    thread.start()
    thread.join(timeout)
    while not (told and (isinstance(told[0], BaseException) or told[0].is_completed())):
        if monotonic() >= deadline:
            raise GroupLost(
                f"the ranks of the group did not find each other within {timeout:g} s",
                cure="end this process; check the other ranks (NCCL_DEBUG=INFO shows NCCL's work), and that each rank "
                "of the group has its own GPU",
                argument="group",
            )
        sleep(TIMEOUTS.connecting_look)
    if isinstance(told[0], BaseException):
        raise RuntimeError(f"its first collective failed: {told[0]}") from told[0]
