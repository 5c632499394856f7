"""Targets besides the device's own memory: tensors without a framework, and Paddle's on this accelerator."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue, View
from hal_core.devices import DeviceMemory, Index, Memory, check_plain, dtype_of

from hal_sim.accelerator import Accelerator
from hal_sim.paddle_env import DEFAULT_NAME

if TYPE_CHECKING:
    from hal_sim.base import OnAccelerator


@dataclass(frozen=True)
class SimTensor:
    """Elements in the accelerator's memory, for use without a framework. Sliced as NumPy's arrays are."""

    view: View

    @classmethod
    def of(cls, device: OnAccelerator, values: np.ndarray[Any, Any]) -> SimTensor:
        """Return a tensor with these values in new memory; the host waits for the copy."""
        data = np.ascontiguousarray(values)
        memory = device.allocate(data.nbytes)
        device.accelerator.h2d_now(memory.address, data.ctypes.data, data.nbytes)
        return cls(View.contiguous(memory, 0, data.shape, dtype_of(data.dtype)))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the values after the work that the host has waited for."""
        view = self.view
        block = np.empty(view.memory.nbytes, np.uint8)
        accelerator_of(view.memory).d2h_now(block.ctypes.data, view.memory.address, view.memory.nbytes)
        return np.ndarray(view.shape, view.dtype.storage, block, view.offset, view.strides).copy()

    def __getitem__(self, index: Index | tuple[Index, ...]) -> SimTensor:
        return SimTensor(self.view[index])


def loaded_paddle() -> tuple[ModuleType, str] | None:
    """Return Paddle and its name of this accelerator, if it is loaded and has one."""
    paddle = sys.modules.get("paddle")
    if paddle is None or not hasattr(paddle, "device"):
        return None
    name = os.environ.get("HALSIM_NAME", DEFAULT_NAME)
    return (paddle, name) if name in paddle.device.get_all_custom_device_type() else None


def is_on_accelerator(value: object) -> bool:
    """Return True for a tensor in the memory of any device of the accelerator."""
    if isinstance(value, SimTensor) or (isinstance(value, DeviceMemory) and hasattr(value.device, "accelerator")):
        return True
    place = getattr(value, "place", None)
    return place is not None and hasattr(value, "data_ptr") and _type_of(place) == _accelerator_type()


def resolve(device: OnAccelerator, target: Any) -> View:  # noqa: ANN401 (any library's tensor)
    """Return a view over the target's own memory. Raises :class:`InvalidValue` for a target that this device cannot
    write."""
    if isinstance(target, DeviceMemory):
        return View.contiguous(target, 0, (target.nbytes,), dtype_of("uint8"))
    if isinstance(target, SimTensor):
        return target.view
    place = getattr(target, "place", None)
    if place is None or not hasattr(target, "data_ptr") or not hasattr(target, "strides"):
        raise InvalidValue(
            f"{type(target).__name__} is not a tensor of this device",
            cure="give a view of a state, a SimTensor, or a Paddle tensor on this accelerator",
            device=device.located,
            argument="target",
        )
    if _type_of(place) != _accelerator_type() or place.custom_device_id() != device.index:
        raise InvalidValue(
            f"the tensor is on {place}, not on device {device.index} of the simulated accelerator",
            cure="open the device that holds it, or move the tensor",
            device=device.located,
            argument="target",
        )
    return _paddle(device, target)


def _type_of(place: Any) -> str:  # noqa: ANN401 (a Paddle place)
    is_custom = getattr(place, "is_custom_place", None)
    return str(place.custom_device_type()) if is_custom is not None and is_custom() else ""


def _accelerator_type() -> str:
    return os.environ.get("HALSIM_NAME", DEFAULT_NAME)


def _paddle(device: OnAccelerator, target: Any) -> View:  # noqa: ANN401 (a Paddle tensor)
    """Return a view whose memory is limited to the view's own bounds."""
    check_plain(target, "target")
    shape, dtype = tuple(target.shape), dtype_of(str(target.dtype))
    strides = tuple(step * dtype.itemsize for step in target.strides)
    empty = 0 in shape
    address = 0 if empty else int(target.data_ptr())
    if not empty and not device.holds(address):
        raise InvalidValue(
            "the tensor has no memory on this device",
            cure="it was freed; give a live one",
            device=device.located,
            argument="target",
        )
    reach = [] if empty else [(count - 1) * step for count, step in zip(shape, strides, strict=True)]
    low = sum(step for step in reach if step < 0)
    nbytes = 0 if empty else sum(map(abs, reach)) + dtype.itemsize
    memory = DeviceMemory(device, address + low, nbytes, keep=target)
    return View(memory, -low, shape, strides, dtype)


def accelerator_of(memory: Memory) -> Accelerator:
    """Return the accelerator that owns the memory."""
    found = getattr(memory.device, "accelerator", None)
    assert isinstance(found, Accelerator)
    return found
