"""Tensors of other libraries as views: Paddle's own, and anything with ``__cuda_array_interface__`` or DLPack."""

from __future__ import annotations

from typing import Any

from hal_core import DType, InvalidValue, View
from hal_core.devices import DeviceMemory, check_resolved, dtype_of

from .driver import Driver


def is_on_device(value: Any) -> bool:  # noqa: ANN401 (any library's tensor)
    """Return True for a tensor of any library on a CUDA device."""
    if hasattr(value, "data_ptr") and hasattr(value, "place"):
        return bool(value.place.is_gpu_place())
    if getattr(value, "is_cuda", False):
        return True
    return hasattr(type(value), "__cuda_array_interface__") and not hasattr(value, "is_cuda")


def resolve(device: Any, driver: Driver, index: int, target: Any) -> View:  # noqa: ANN401 (any library's tensor)
    """Return a view over the tensor's own memory. Raises :class:`InvalidValue` for a tensor that this device cannot
    write."""
    if hasattr(target, "data_ptr") and hasattr(target, "place"):
        return _paddle(device, index, target)
    if getattr(target, "is_cuda", None) is False:
        raise _elsewhere(f"the tensor is on {target.device}", index)
    if hasattr(target, "is_cuda"):
        return _torch(device, index, target)
    interface = getattr(target, "__cuda_array_interface__", None)
    if interface is not None:
        return _interface(device, driver, index, target, interface)
    if hasattr(target, "__dlpack__") and hasattr(target, "__dlpack_device__"):
        return _dlpack(device, index, target)
    raise InvalidValue(
        f"{type(target).__name__} is not a tensor of this device",
        cure="give a view of a state, or a tensor on the GPU (Paddle, __cuda_array_interface__ or DLPack)",
        device=f"cuda:{index}",
        argument="target",
    )


def _elsewhere(what: str, index: int) -> InvalidValue:
    return InvalidValue(
        f"{what}, not on GPU {index}",
        cure="open the device that holds it, or move the tensor",
        device=f"cuda:{index}",
        argument="target",
    )


def _paddle(device: Any, index: int, target: Any) -> View:  # noqa: ANN401
    check_resolved(target, "target")
    place = target.place
    if not place.is_gpu_place() or place.gpu_device_id() != index:
        raise _elsewhere(f"the tensor is on {place}", index)
    return _view(
        device, index, int(target.data_ptr()), target.shape, _paddle_strides(target), str(target.dtype), target
    )


def _paddle_strides(target: Any) -> list[int]:  # noqa: ANN401
    """Return strides in elements: an attribute since Paddle 3, ``get_strides`` before."""
    strides = getattr(target, "strides", None)
    return list(target.get_strides() if strides is None else strides)


def _torch(device: Any, index: int, target: Any) -> View:  # noqa: ANN401
    if target.device.index != index:
        raise _elsewhere(f"the tensor is on {target.device}", index)
    check_resolved(target, "target")
    return _view(device, index, target.data_ptr(), target.shape, target.stride(), str(target.dtype), target)


def _interface(device: Any, driver: Driver, index: int, target: Any, interface: dict[str, Any]) -> View:  # noqa: ANN401
    address, read_only = interface["data"]
    if read_only:
        raise InvalidValue("the array is read-only", cure="give a writable one", argument="target")
    attribute = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    if address:
        ordinal = driver.ok(driver.api.cuPointerGetAttribute(attribute, address), "cuPointerGetAttribute")
        if int(ordinal) != index:
            raise _elsewhere(f"the array is on GPU {int(ordinal)}", index)
    dtype, shape = dtype_of(_numpy_name(interface["typestr"])), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is not None and any(step % dtype.itemsize for step in strides):
        what = f"strides of {tuple(strides)} bytes are no whole elements of {dtype.name}"
        raise InvalidValue(what, cure="give an array whose elements are aligned", argument="target")
    steps = None if strides is None else [step // dtype.itemsize for step in strides]
    return _view(device, index, address, shape, _packed(shape) if steps is None else steps, dtype.name, target)


def _dlpack(device: Any, index: int, target: Any) -> View:  # noqa: ANN401
    """Read it through cuda-core's reader of DLPack capsules."""
    from cuda.core.utils import StridedMemoryView

    kind, ordinal = target.__dlpack_device__()
    if int(kind) != 2 or ordinal != index:
        raise _elsewhere(f"the DLPack device is ({int(kind)}, {ordinal})", index)
    try:
        found = StridedMemoryView.from_dlpack(target, stream_ptr=-1)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(target).__name__} gives no DLPack capsule: {error}"
        raise InvalidValue(what, cure="give a dense tensor", device=f"cuda:{index}", argument="target") from error
    if found.readonly:
        raise InvalidValue("the array is read-only", cure="give a writable one", argument="target")
    shape = tuple(found.shape)
    strides = _packed(shape) if found.strides is None else list(found.strides)
    return _view(device, index, int(found.ptr), shape, strides, str(found.dtype), (target, found))


def _numpy_name(typestr: str) -> str:
    import numpy as np

    return np.dtype(typestr).name


def _packed(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return strides[::-1]


def _view(device: Any, index: int, address: int, shape: Any, strides: Any, dtype: str, keep: object) -> View:  # noqa: ANN401
    row_lengths, found = tuple(shape), dtype_of(dtype)
    if address == 0 and 0 not in row_lengths:
        raise InvalidValue(
            "the tensor has no memory", cure="it was freed; give a live one", device=f"cuda:{index}", argument="target"
        )
    return _bounded(device, address, row_lengths, tuple(step * found.itemsize for step in strides), found, keep)


def _bounded(
    device: Any,  # noqa: ANN401
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    keep: object,
) -> View:
    """Return a view whose memory is limited to the view's own bounds."""
    reach = [(count - 1) * step for count, step in zip(shape, strides, strict=True)] if 0 not in shape else []
    low = sum(step for step in reach if step < 0)
    nbytes = sum(map(abs, reach)) + dtype.itemsize if 0 not in shape else 0
    return View(DeviceMemory(device, address + low, nbytes, keep), -low, shape, strides, dtype)
