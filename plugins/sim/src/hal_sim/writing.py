"""Values that are not one run of bytes: fills, and the strided kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue, Ticket, View

from hal_sim._native import MAX_RANK
from hal_sim.primitives import Ints, StridedLaunch

if TYPE_CHECKING:
    from hal_core.devices import AsyncStream

    from hal_sim.base import OnAccelerator


def fill(device: OnAccelerator, target: View, value: np.generic, stream: AsyncStream) -> Ticket:
    """Fill one run of bytes with the pattern of one element; one launch, no staging."""
    address, pattern = device.address_of(target.memory) + target.offset, value.tobytes()
    number = int.from_bytes(pattern, "little")
    device.order_after_reads(stream, target.memory)
    device.accelerator.fill(address, target.collapsed()[2], number, len(pattern), stream.raw)
    device.primitives.count("launches")
    return device.ticket(stream)


def spread(
    device: OnAccelerator, target: View, value: np.ndarray[Any, Any] | np.generic, stream: AsyncStream
) -> Ticket:
    """Stage the values and launch one kernel that writes them to their places; one element goes to all places."""
    shape, strides, item = target.collapsed()
    steps: Ints
    if isinstance(value, np.ndarray):
        steps = _packed(shape, item)
    else:  # a stride of 0, over the elements
        if item != target.dtype.itemsize:
            item = target.dtype.itemsize
            shape, strides = (*shape, target.collapsed()[2] // item), (*strides, item)
        steps = (0,) * len(shape)
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    launch = StridedLaunch(device.address_of(target.memory) + target.offset, strides, steps, shape, item)
    return device.launch_staged(data.nbytes, lambda block: np.copyto(block, data), launch, target.memory, stream)


def copy(device: OnAccelerator, target: View, source: View, stream: AsyncStream) -> Ticket:
    """Copy between two views of this device, in stream order, as if the source were read before any write."""
    (shape, to), (from_shape, from_), item = _axes(target), _axes(source), target.dtype.itemsize
    dst = device.address_of(target.memory) + target.offset
    src = device.address_of(source.memory) + source.offset
    device.order_after_reads(stream, target.memory)

    def launch(address: int, strides: Ints, block: int, steps: Ints, axes: Ints) -> None:
        device.primitives.launch(StridedLaunch(address, strides, steps, axes, item), block, stream.raw)
        device.primitives.count("launches")

    try:
        if target.shape == source.shape and not _overlap(target, source):
            launch(dst, to, src, from_, shape)
        else:
            between = device.allocate(target.size * item)
            launch(between.address, _packed(from_shape, item), src, from_, from_shape)
            launch(dst, to, between.address, _packed(shape, item), shape)
    finally:
        ticket = device.ticket(stream)  # before the intermediate memory is dropped, which waits for it
    return ticket


def _axes(view: View) -> tuple[Ints, Ints]:
    """Return shape and strides without axes of one. Raises if more remain than the strided kernel supports."""
    axes = [(n, step) for n, step in zip(view.shape, view.strides, strict=True) if n != 1]
    if len(axes) > MAX_RANK:
        raise InvalidValue(
            f"the device value has {len(axes)} axes", cure=f"reshape it to at most {MAX_RANK}", argument="value"
        )
    return tuple(n for n, _ in axes), tuple(step for _, step in axes)


def _packed(shape: Ints, item: int) -> Ints:
    """Return the strides of consecutive items of ``item`` bytes."""
    return tuple(item * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _overlap(one: View, other: View) -> bool:
    (low, high), (begin, end) = one.bounds(), other.bounds()
    a, b = one.memory.address, other.memory.address
    return a + low < b + end and b + begin < a + high
