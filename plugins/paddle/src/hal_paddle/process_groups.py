"""Paddle's process groups over a chip's library, each created only by its members, with its own store.

``paddle.distributed.new_group`` makes every group of a job publish its addresses in one store under the same keys. A
rank sometimes reads those of an older group and then fails to connect, or waits without end. Here each group gets its
own store, served by its first rank, and only members take part. ``paddle.distributed`` itself need not be set up.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import TIMEOUTS, GroupLost, HalError, InvalidValue
from hal_core.devices import HeldPort, own_host, wait_for_listener

from .places import paddle_core, paddle_device

if TYPE_CHECKING:
    from hal_core.devices import Maker, Share

WHERE = struct.Struct("<46sII")
"""Host and port of a group's store, and Paddle's number of the group."""
Create = Callable[[Any, int, int, int], Any]
"""Creates Paddle's process group from a store, the rank within the group, its size, and a number."""


class PaddleGroup:
    """A process group of Paddle's. Device libraries cannot be aborted through Paddle: the watchdog reports the loss to
    the caller, and the process must end."""

    def __init__(self, group: Any, store: object) -> None:  # noqa: ANN401 (of Paddle's)
        self.group, self._store = group, store

    def abort(self) -> None:
        """Do nothing, as Paddle has no call for it."""

    def close(self) -> None:
        """Do nothing: Paddle's groups end with the process."""


def maker_on(place: object, library: str) -> Maker:
    """Return the maker of a library's groups for the devices on ``place``, a place of Paddle's or its name."""
    make = {"xccl": xccl, "bkcl": bkcl, "nccl": nccl}[library]

    def made(ranks: Sequence[int], me: int, share: Share, timeout: float) -> PaddleGroup:
        with paddle_device(place):
            return make(ranks, me, share, timeout)

    return made


def xccl(ranks: Sequence[int], me: int, share: Share, timeout: float) -> PaddleGroup:
    """Create a group over the library of Paddle's current CustomDevice; a :data:`hal_core.devices.Maker`."""
    import paddle

    core, kind = paddle_core(), str(paddle.get_device()).partition(":")[0]

    def create(store: Any, rank: int, size: int, number: int) -> Any:  # noqa: ANN401
        return core.ProcessGroupCustom.create(store, kind, rank, size, number)

    return make_group(create, ranks, me, share, timeout)


def bkcl(ranks: Sequence[int], me: int, share: Share, timeout: float) -> PaddleGroup:
    """Create a group over BKCL, XPU's library; a :data:`hal_core.devices.Maker`."""
    return make_group(paddle_core().ProcessGroupBKCL.create, ranks, me, share, timeout)


def nccl(ranks: Sequence[int], me: int, share: Share, timeout: float) -> PaddleGroup:
    """Create a group over NCCL on Paddle's current GPU; a :data:`hal_core.devices.Maker`."""
    timeout = max(timeout, TIMEOUTS.connecting)

    def create(store: Any, rank: int, size: int, number: int) -> Any:  # noqa: ANN401
        place = _current_gpu()
        # As Paddle itself does before it uses NCCL; otherwise a group's communicator has no stream.
        paddle_core().CommContextManager.set_device_id(place.get_device_id())
        group = _by_paddle("nccl", store, rank, size, number)
        connect(group, place, timeout)
        return group

    return make_group(create, ranks, me, share, timeout)


def make_group(create: Create, ranks: Sequence[int], me: int, share: Share, timeout: float) -> PaddleGroup:
    """Create the group of these ranks together with its members. Raises :class:`GroupLost` if a rank does not come."""
    core, first = paddle_core(), me == ranks[0]
    try:
        host = own_host()  # an address: a name may have more bytes than WHERE
        with HeldPort(host) if first else contextlib.nullcontext(None) as held:
            # held until the store binds it: Paddle ends the process if the port is in use
            port, number = (0, 0) if held is None else (held.number, 1 << 30 | int.from_bytes(os.urandom(4)) >> 2)
            address, port, number = WHERE.unpack(share(WHERE.pack(host.encode(), port, number)))
            host = address.rstrip(b"\0").decode()
            if not first:  # Paddle itself tries once and again only after 3 s, and may never give up
                wait_for_listener(host, port, timeout, ranks[0]).close()
            store = core.TCPStore(host, port, first, len(ranks), max(1, round(timeout)))
        return PaddleGroup(create(store, list(ranks).index(me), len(ranks), number), store)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, HalError):
            raise
        raise GroupLost(
            f"rank {me} could not make the group {tuple(ranks)}: {error}",
            cure="check whether its ranks are running, and whether they can reach each other",
            argument="group",
        ) from error


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

    tensor, result, deadline = paddle.to_tensor(np.zeros(8, np.uint8), place=place), [], monotonic() + timeout

    def call() -> None:
        try:
            result.append(group.broadcast(tensor, 0, True))
        except BaseException as error:  # noqa: BLE001 (raised by the caller of connect)
            result.append(error)

    thread = threading.Thread(target=call, name="hal-connect", daemon=True)
    thread.start()
    thread.join(timeout)
    while not (result and (isinstance(result[0], BaseException) or result[0].is_completed())):
        if monotonic() >= deadline:
            raise GroupLost(
                f"the ranks of the group did not find each other within {timeout:g} s",
                cure="end this process; check the other ranks (NCCL_DEBUG=INFO shows NCCL's work), and that each rank "
                "of the group has its own GPU",
                argument="group",
            )
        sleep(TIMEOUTS.poll_most)
    if isinstance(result[0], BaseException):
        raise RuntimeError(f"its first collective failed: {result[0]}") from result[0]
