"""Support for the kit of devices with groups of ranks on one host, and of devices in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.contract.support import Support

if TYPE_CHECKING:
    from hal_core.contract.device import Device


class JobRanks(Support):
    """Support of devices whose groups need no library but hal's own."""

    ranks = True
    four_ranks = True

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the variables that describe the job."""
        from .processes import job_variables

        return job_variables(rank, endpoints)

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Open all groups in the same order; lost ones are created again."""
        from hal_core.devices import open_groups

        open_groups(groups, timeout=timeout)


GlooRanks = JobRanks
"""Its name in version 1.1, for one release."""


class HostSupport(JobRanks):
    """The same, with tensors in host memory that NumPy can share."""

    tensors = True

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """Return the array itself: such a device writes NumPy arrays in place."""
        return values

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (an array)
        """Return a copy of the array."""
        return np.array(tensor)
