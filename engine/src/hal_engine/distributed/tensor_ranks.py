"""Collectives on Paddle's own tensors, for a model that is split over the ranks of a group.

ranks = TensorRanks(Group((0, 1), 0))
ranks.all_reduce(partial)              # in place: the sum over all ranks
everything = ranks.gather(part)        # on the first rank alone, elsewhere None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal_core.devices import OpenGroup, opened, paddle_core

if TYPE_CHECKING:
    from hal_core import Group


def library_of(place: str, beside: str) -> str:
    """Return the collective library for tensors on a place (Paddle's name, such as "gpu:0"): "gloo" for host memory,
    else ``beside``, the library of the computing device."""
    import paddle

    return "gloo" if paddle.to_tensor(0, place=place).place.is_cpu_place() else beside


class TensorRanks:
    """One rank's view of its group. Every rank makes the same calls in the same order, with tensors of one shape and
    dtype.

    The group must be open (:func:`hal_core.devices.open_groups`, with the same library). Over gloo, a lost or hung rank
    makes the call raise :class:`hal_core.GroupLost` within the group's timeout. Other libraries cannot be
    aborted, so the caller must watch the wait for their results.
    """

    def __init__(self, group: Group, *, backend: str = "gloo", timeout: float | None = None) -> None:
        self.group = group
        self.size, self.index = group.size, group.ranks.index(group.rank)
        self._open: OpenGroup = opened(group, backend=backend, timeout=timeout)
        self._first = self._open.ranks.index(group.source)
        self._sum = paddle_core().ReduceOp.SUM

    def all_reduce(self, tensor: Any) -> Any:  # noqa: ANN401 (a Paddle tensor)
        """Sum over all ranks, in place; return the same tensor."""
        self._wait(lambda group: group.all_reduce(tensor, self._sum, True))
        return tensor

    def gather(self, tensor: Any) -> Any:  # noqa: ANN401
        """Return ``[n, …]`` of each rank as ``[size, n, …]`` on the group's first rank; None on the others."""
        found = self._empty(tensor) if self.group.is_first else tensor
        self._wait(lambda group: group.gather(tensor, found, self._first, True, False))
        return found.reshape([self.size, *tensor.shape]) if self.group.is_first else None

    def all_gather(self, tensor: Any) -> Any:  # noqa: ANN401
        """Return ``[n, …]`` of each rank as ``[size, n, …]`` on all ranks."""
        found = self._empty(tensor)
        self._wait(lambda group: group.all_gather(found, tensor, True))
        return found.reshape([self.size, *tensor.shape])

    def _empty(self, tensor: Any) -> Any:  # noqa: ANN401
        """Return a tensor for the results of all ranks; the ranks of a process group are in rising order, as a group's
        are."""
        import paddle

        with paddle.no_grad():
            return paddle.concat([tensor] * self.size)

    def _wait(self, call: Callable[[Any], Any]) -> None:
        self._open.watched(lambda: call(self._open.process_group).wait())
