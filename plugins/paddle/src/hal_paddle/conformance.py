"""Support of a Paddle-backed device for the conformance kit (entry-point group ``hal.conformance``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import Support
from hal_core.devices import join_world, open_groups

from .process_groups import xccl

if TYPE_CHECKING:
    from hal_core import Device


class PaddleSupport(Support):
    """Tensors of Paddle on the device's place. ``update_inputs`` copies out and back, and so waits for the device."""

    tensors = True
    update_waits = True
    keeps = 2  # an empty list and its place for each tensor made over host memory (seen with 3.3)

    def versions(self, device: Device) -> Mapping[str, str]:
        """Return Paddle's version, which has the runtime of its plugin below it."""
        import paddle

        return {"paddle": paddle.__version__}

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """Return a Paddle tensor with these values on the device's place."""
        import paddle

        return paddle.to_tensor(values, place=device.place)  # type: ignore[attr-defined]  # a PaddleDevice

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (a Paddle tensor)
        """Return the values as Paddle itself copies them to the host."""
        return np.asarray(tensor.numpy())


class SimulatedRanks(PaddleSupport):
    """Several ranks on a simulated accelerator in place of the chip, each a process with that accelerator.

    ``module`` is the simulator (see :class:`hal_paddle.CustomDevicePlugin`), ``kind`` is its type name in Paddle.
    Ranks on a chip are not offered: the choice of a device for each rank could not be tested.
    """

    ranks = True
    loss_ends_ranks = True

    def __init__(self, module: str, kind: str) -> None:
        self.module, self.kind = module, kind

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the variables of the job and the accelerator; each rank has its own devices."""
        environment = import_module(f"{self.module}.paddle_env")
        variables: dict[str, str] = environment.distributed(rank, endpoints, endpoints[0], self.kind)
        return variables | {f"FLAGS_selected_{self.kind}s": "0"}

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Join the job without a time limit and open all groups. The accelerator gives up after the watchdog."""
        import paddle

        paddle.set_device(f"{self.kind}:0")
        join_world()
        import_module(self.module).set_option("collective_timeout_ms", round(1500 * timeout))
        open_groups(groups, backend="xccl", timeout=timeout, make=xccl)
