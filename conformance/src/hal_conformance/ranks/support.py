"""Support for the kit of devices with groups over gloo, and of devices in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.support import Support
from hal_core.devices.paddle.processor import lacks_for_paddle

if TYPE_CHECKING:
    from hal_core.contract.device import Device


class GlooRanks(Support):
    """Support of devices with groups over gloo."""

    ranks = find_spec("paddle") is not None and not lacks_for_paddle()
    whole_group = ranks

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the variables for ``paddle.distributed``."""
        from .processes import gloo

        return gloo(rank, endpoints)

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Open all groups in the same order; lost ones are created again."""
        from hal_core.devices.paddle.ranks.groups import open_groups

        open_groups(groups, timeout=timeout)


class HostSupport(GlooRanks):
    """The same, with tensors in host memory that NumPy can share."""

    tensors = True

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """Return the array itself: such a device writes NumPy arrays in place."""
        return values

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (an array)
        """Return a copy of the array."""
        return np.array(tensor)
