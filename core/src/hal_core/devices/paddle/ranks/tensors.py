"""Collectives on Paddle's own tensors, for a model that is split over the ranks of a group.

ranks = TensorRanks(Group((0, 1), 0))
ranks.all_reduce(partial)              # in place: the sum over all ranks
everything = ranks.gather(part)        # on the first rank alone, elsewhere None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..places import paddle_core
from .groups import OpenGroup, opened
from .world import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from ....group import Group


def library_of(place: str, beside: str) -> str:
    """The library of collectives for tensors on a place (Paddle's name, as "gpu:0"): "gloo" for the host's memory, else
    ``beside``, that of the device which computes there."""
    import paddle

    return "gloo" if paddle.to_tensor(0, place=place).place.is_cpu_place() else beside


class TensorRanks:
    """One rank's view of its group. Every rank makes the same calls in one order, with tensors of one shape and dtype.

    The group must be open (:func:`hal_core.devices.open_groups`, with the same library). A lost or hung rank makes the
    call raise :class:`hal_core.errors.GroupLost` within the group's timeout over gloo; other libraries cannot be told
    to give up, so there the wait for their results has to be watched.
    """

    def __init__(self, group: Group, *, backend: str = "gloo", timeout: float = DEFAULT_TIMEOUT) -> None:
        self.group = group
        self.size, self.index = group.size, group.ranks.index(group.rank)
        self._open: OpenGroup = opened(group, backend=backend, timeout=timeout)
        self._first = self._open.ranks.index(group.source)
        self._sum = paddle_core().ReduceOp.SUM

    def all_reduce(self, tensor: Any) -> Any:  # noqa: ANN401 (a Paddle tensor)
        """The sum over all ranks, in place; the same tensor."""
        self._wait(lambda group: group.all_reduce(tensor, self._sum, True))
        return tensor

    def gather(self, tensor: Any) -> Any:  # noqa: ANN401
        """``[n, …]`` of each rank as ``[size, n, …]`` on the group's first rank; None on the others."""
        found = self._empty(tensor) if self.group.is_first else tensor
        self._wait(lambda group: group.gather(tensor, found, self._first, True, False))
        return found.reshape([self.size, *tensor.shape]) if self.group.is_first else None

    def all_gather(self, tensor: Any) -> Any:  # noqa: ANN401
        """``[n, …]`` of each rank as ``[size, n, …]`` on all of them."""
        found = self._empty(tensor)
        self._wait(lambda group: group.all_gather(found, tensor, True))
        return found.reshape([self.size, *tensor.shape])

    def _empty(self, tensor: Any) -> Any:  # noqa: ANN401
        """Room for what all ranks have; the ranks of a process group are in rising order, as those of a group are."""
        import paddle

        with paddle.no_grad():
            return paddle.concat([tensor] * self.size)

    def _wait(self, call: Callable[[Any], Any]) -> None:
        self._open.watched(lambda: call(self._open.process_group).wait())
