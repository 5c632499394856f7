"""Paddle's process groups, each made by its members alone, with a store of its own.

``paddle.distributed.new_group`` has every group of a job publish its addresses in one store under the same keys, so
that a rank now and then reads those of an older group and connects to nobody, or waits for ever. Each group here gets
a store of its own, which its first rank serves. Only members take part.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import GroupLost, InvalidValue
from .gloo import GlooSockets
from .paddle.places import paddle_core
from .paddle_world import wait_for_listener
from .peers import Endpoint, receive, send

WHERE = struct.Struct("<II")
"""Port of a group's store, and the number under which Paddle keeps the group."""

Made = tuple[Any, Callable[[], None]]
"""A process group, and what ends a call that waits in it."""


def make_group(
    backend: str,
    ranks: Sequence[int],
    me: int,
    endpoints: Mapping[int, Endpoint],
    links: Mapping[int, socket.socket],
    timeout: float,
) -> tuple[Any, Callable[[], None], Any]:
    """Make the group of these ranks, as its members do together: Paddle's process group, what ends a call, its store.

    ``links`` are the connections with the other members. Raises :class:`GroupLost` when one does not come.
    """
    core, create = paddle_core(), _creator(backend)
    host, first = endpoints[ranks[0]].host, me == ranks[0]
    try:
        if first:
            port, number = _free_port(host), int.from_bytes(os.urandom(4), "little") % (1 << 30) + (1 << 30)
            for link in links.values():
                send(link, WHERE.pack(port, number))
        else:
            port, number = WHERE.unpack(receive(links[ranks[0]], WHERE.size, timeout))
            wait_for_listener(host, port, timeout, ranks[0])
        store = core.TCPStore(host, port, first, len(ranks), max(1, round(timeout)))
        group, abort = create(store, list(ranks).index(me), len(ranks), number)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, GroupLost):
            raise
        raise GroupLost(
            f"rank {me} could not make the group {tuple(ranks)}: {error}",
            cure="see what became of its ranks, and whether they reach each other",
            argument="group",
        ) from error
    return group, abort, store


def _creator(backend: str) -> Callable[[Any, int, int, int], Made]:
    """The way to make a group over this library, from a store, the rank within the group, its size, and a number."""
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

    known = {"gloo": gloo, "xccl": xccl, "bkcl": bkcl}
    if backend not in known:
        raise InvalidValue(
            f"no process groups over {backend!r} are known", cure=f"known: {', '.join(known)}", argument="group"
        )
    return known[backend]


def _nothing() -> None:
    """Libraries of devices cannot be told to give up: their watchdog tells the caller, and the process has to end."""


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        return int(server.getsockname()[1])
