"""Collectives on Paddle's own tensors, for a model that is split over the ranks of a group.

ranks = TensorRanks(Group((0, 1), 0))
ranks.all_reduce(partial)              # in place: the sum over all ranks
everything = ranks.gather(part)        # on the first rank alone, elsewhere None
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue
from hal_core.devices import HOST, HostGroup, OpenGroup, dtype_of, open_groups, opened

from hal.local_rank import HOST_PLACE

if TYPE_CHECKING:
    from hal_core import Group


def library_of(place: str, collective: str) -> str:
    """Return the collective library for tensors on a place (Paddle's name, such as "gpu:0"): hal's own for host memory,
    else ``collective``, that of the computing device. Raises as :func:`hal_paddle_runner.weights.check_place`."""
    if place == HOST_PLACE:
        return HOST
    import paddle

    from .weights import check_place

    check_place(place)
    return HOST if paddle.to_tensor(0, place=place).place.is_cpu_place() else collective


def open_on_place(
    device: Any,  # noqa: ANN401 (a device)
    groups: Sequence[Sequence[int]],
    place: str,
    library: str,
    *,
    timeout: float | None = None,
) -> None:
    """Open groups of global ranks over a library of Paddle's, for a model's tensors on ``place`` (as "gpu:0"), unless
    the device makes its own groups by that library. Every rank of the job makes the same call."""
    if getattr(getattr(device, "device", device), "groups_by", "") == library:
        return
    import paddle

    before = paddle.get_device()
    paddle.set_device(place)
    try:
        open_groups(groups, backend=library, timeout=timeout)
    finally:
        paddle.set_device(before)


class TensorRanks:
    """One rank's view of its group. Every rank makes the same calls in the same order, with tensors of one shape and
    dtype; on the host they may be contiguous arrays too.

    The group must be open (:func:`hal_core.devices.open_groups`, with the same library). On the host, a lost or hung
    rank makes the call raise :class:`hal_core.GroupLost` within the group's timeout. Other libraries cannot be
    aborted, so the caller must watch the wait for their results.
    """

    def __init__(self, group: Group, *, backend: str = HOST, timeout: float | None = None) -> None:
        self.group = group
        self.size, self.index = group.size, group.ranks.index(group.rank)
        self._open: OpenGroup = opened(group, backend=backend, timeout=timeout)
        first, made = self._open.ranks.index(group.source), self._open.process_group
        self._by = _OnHost(made, first) if isinstance(made, HostGroup) else _OnDevice(made.group, first)

    def all_reduce(self, tensor: Any) -> Any:  # noqa: ANN401 (a Paddle tensor)
        """Sum over all ranks, in place; return the same tensor."""
        self._open.watched(self._by.all_reduce, tensor)
        return tensor

    def summing(self, part: np.ndarray[Any, Any], total: np.ndarray[Any, Any]) -> Callable[[], None]:
        """Return a call that writes the sum over all ranks' parts to ``total``, arrays on the host, which keep their
        memory and may be one."""
        assert isinstance(self._by, _OnHost)
        return partial(self._open.watched, self._by.summing(part, total))

    def gather(self, tensor: Any) -> Any:  # noqa: ANN401
        """Return ``[n, …]`` of each rank as ``[size, n, …]`` on the group's first rank; None on the others."""
        found = self._empty(tensor) if self.group.is_first else tensor
        self._open.watched(self._by.gather, tensor, found)
        return found.reshape([self.size, *tensor.shape]) if self.group.is_first else None

    def all_gather(self, tensor: Any) -> Any:  # noqa: ANN401
        """Return ``[n, …]`` of each rank as ``[size, n, …]`` on all ranks."""
        found = self._empty(tensor)
        self._open.watched(self._by.all_gather, tensor, found)
        return found.reshape([self.size, *tensor.shape])

    def _empty(self, tensor: Any) -> Any:  # noqa: ANN401
        """Return a tensor for the results of all ranks; the ranks of a group are in rising order, as a group's are."""
        if isinstance(tensor, np.ndarray):
            return np.empty((self.size * len(tensor), *tensor.shape[1:]), tensor.dtype)
        import paddle

        with paddle.no_grad():
            return paddle.concat([tensor] * self.size)


class _OnHost:
    """The collectives of hal's own library on tensors in host memory."""

    def __init__(self, group: HostGroup, first: int) -> None:
        self._group, self._first, self.summing = group, first, group.summing

    def all_reduce(self, tensor: Any) -> None:  # noqa: ANN401 (a Paddle tensor)
        self._group.all_reduce(_bytes(tensor), dtype_of(str(tensor.dtype)))

    def gather(self, tensor: Any, found: Any) -> None:  # noqa: ANN401
        self._group.gather(_bytes(tensor), _bytes(found), self._first)

    def all_gather(self, tensor: Any, found: Any) -> None:  # noqa: ANN401
        self._group.all_gather(_bytes(tensor), _bytes(found))


class _OnDevice:
    """The collectives of a process group of Paddle's."""

    def __init__(self, group: Any, first: int) -> None:  # noqa: ANN401 (a process group of Paddle's)
        import paddle

        self._group, self._first, self._sum = group, first, paddle.base.core.ReduceOp.SUM

    def all_reduce(self, tensor: Any) -> None:  # noqa: ANN401
        self._group.all_reduce(tensor, self._sum, True).wait()

    def gather(self, tensor: Any, found: Any) -> None:  # noqa: ANN401
        self._group.gather(tensor, found, self._first, True, False).wait()

    def all_gather(self, tensor: Any, found: Any) -> None:  # noqa: ANN401
        self._group.all_gather(found, tensor, True).wait()


def _bytes(tensor: Any) -> memoryview:  # noqa: ANN401 (a Paddle tensor)
    """Return the bytes of a contiguous tensor in host memory."""
    if isinstance(tensor, np.ndarray):
        return memoryview(tensor.data).cast("B")
    count = tensor.element_size()
    for length in tensor.shape:
        count *= length
    if not tensor.is_contiguous():
        raise InvalidValue("the tensor is not contiguous", cure="give tensor.contiguous()", argument="tensor")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B") if count else memoryview(b"")
