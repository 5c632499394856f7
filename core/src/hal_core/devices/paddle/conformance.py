"""What the conformance kit is told of a Paddle-backed device (entry-point group ``hal.conformance``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ...contract.support import Support
from .ranks.groups import open_groups
from .ranks.world import join_world

if TYPE_CHECKING:
    from ...contract.device import Device


class PaddleSupport(Support):
    """Tensors of Paddle on the device's place. ``update_inputs`` copies out and back, and so waits for the device."""

    tensors = True
    update_waits = True
    keeps = 2  # an empty list and its place, of each tensor that is made over memory of the host (seen with 3.3)

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """A Paddle tensor with these values on the device's place."""
        import paddle

        return paddle.to_tensor(values, place=device.place)  # type: ignore[attr-defined]  # a PaddleDevice

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (a Paddle tensor)
        """The values as Paddle itself copies them to the host."""
        return np.asarray(tensor.numpy())


class SimulatedRanks(PaddleSupport):
    """Several ranks where a simulated accelerator stands in for the chip, each a process with that accelerator.

    ``module`` stands in (see :class:`hal_core.devices.CustomDevicePlugin`), ``kind`` is the type name that Paddle
    knows it by. Ranks are not offered on a chip: which of its devices a rank should take, nobody here could try.
    """

    ranks = True
    loss_ends_ranks = True

    def __init__(self, module: str, kind: str) -> None:
        self.module, self.kind = module, kind

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """What ``paddle.distributed`` and the accelerator ask for; each rank has devices of its own."""
        environment = import_module(f"{self.module}.paddle_env")
        told: dict[str, str] = environment.distributed(rank, endpoints, endpoints[0], self.kind)
        return told | {f"FLAGS_selected_{self.kind}s": "0"}

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Join the job, in whatever time it takes; open all groups. The accelerator gives up after the watchdog."""
        import paddle

        paddle.set_device(f"{self.kind}:0")
        join_world(backend="xccl")
        import_module(self.module).set_option("collective_timeout_ms", round(1500 * timeout))
        open_groups(groups, backend="xccl", timeout=timeout)
