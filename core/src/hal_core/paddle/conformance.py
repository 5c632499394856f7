"""What the conformance kit is told of a Paddle-backed device (entry-point group ``hal.conformance``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..conformance.seams import Support

if TYPE_CHECKING:
    from ..device import Device


class PaddleSupport(Support):
    """Tensors of Paddle on the device's place. ``advance`` copies out and back, and so waits for the device."""

    tensors = True
    advance_waits = True

    def tensor(self, device: Device, values: np.ndarray[Any, Any]) -> object:
        """A Paddle tensor with these values on the device's place."""
        import paddle

        return paddle.to_tensor(values, place=device.place)  # type: ignore[attr-defined]  # a PaddleDevice

    def values_of(self, device: Device, tensor: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401 (a Paddle tensor)
        """The values as Paddle itself copies them to the host."""
        return np.asarray(tensor.numpy())
