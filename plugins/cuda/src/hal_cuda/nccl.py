"""The NCCL communicator of a group, through ``paddle.distributed``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.errors import CapabilityMissing

if TYPE_CHECKING:
    from hal_core.device import Communicator
    from hal_core.group import Group

    from .device import CudaDevice


def open_communicator(device: CudaDevice, group: Group) -> Communicator:
    """Open ``group``; all its ranks call this in one order."""
    raise CapabilityMissing(
        "broadcasts over NCCL are not wired up",
        cure="run one rank",
        device=f"cuda:{device.index}",
        hook="broadcast_tokens",
    )
