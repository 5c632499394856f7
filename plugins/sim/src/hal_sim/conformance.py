"""Support of the sim device for the conformance kit: tensors on the accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import Support

from hal_sim.settings import set_option
from hal_sim.targets import SimTensor, loaded_paddle

if TYPE_CHECKING:
    from hal_core import Device


class SimSupport(Support):
    """Paddle's tensors if Paddle has loaded the accelerator, else its own."""

    tensors = True
    ranks = True
    four_ranks = True

    def rank_environment(self, rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        """Return the endpoints, by which ranks find each other's shared memory."""
        return {"PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints)}

    def join(self, groups: Sequence[Sequence[int]], timeout: float, epoch: str) -> None:
        """Name the job after the parent, its start and the test, so that groups of earlier tests are never met
        again."""
        set_option("collective_timeout_ms", round(1000 * timeout))
        parent = os.getppid()
        started = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        os.environ["HALSIM_JOB"] = f"{parent}_{started}_{epoch}"

    def is_locked(self, device: Device, address: int) -> bool:
        """Return whether the accelerator has pinned the memory."""
        from hal_sim.device import SimDevice

        assert isinstance(device, SimDevice)
        return device.accelerator.is_pinned(address)

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """Return a tensor with these values on the device."""
        from hal_sim.device import SimDevice

        assert isinstance(device, SimDevice)
        known = loaded_paddle()
        if known is None:
            return SimTensor.of(device, values)
        paddle, name = known
        return paddle.to_tensor(values, place=paddle.CustomPlace(name, device.index))

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (Paddle's, or ours)
        """Return the values, read in the tensor's own way."""
        return np.array(tensor.numpy())
