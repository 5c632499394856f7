"""Copies between two views of one device's memory, made by a kernel in stream order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hal_core import InvalidValue, View

from .structs import THREADS

if TYPE_CHECKING:
    from .base import OnGpu

AXES = 4
"""Axes of a view that ``hal_copy_strided`` supports."""


def load_copy(device: OnGpu, target: View, source: View) -> Iterator[int]:
    """Set the parameters of ``hal_copy_strided`` and yield its blocks of threads, for each launch of a copy.

    The caller launches the kernel, and records an event, before it takes the next launch. Overlapping views take two
    launches, through separate memory: otherwise threads would write bytes that other threads have yet to read. So does
    a source with gaps or permuted axes for a target of another shape, which takes its elements in row-major order.
    """
    if len(target.shape) > AXES or len(source.shape) > AXES:
        raise InvalidValue(f"a device value of more than {AXES} axes", cure="reshape it", argument="value")
    reshapes = source.shape != target.shape
    if _overlap(source, target) or (reshapes and source.collapsed()[0]):
        memory = device.allocate(target.size * target.dtype.itemsize)
        separate = View.contiguous(memory, 0, source.shape, target.dtype)
        yield _load(device, separate, source)
        source = separate
    if reshapes:
        source = View.contiguous(source.memory, source.offset, target.shape, source.dtype, source.owner)
    yield _load(device, target, source)


def _load(device: OnGpu, target: View, source: View) -> int:
    params = device.kernels.copy_strided.params
    pad = AXES - len(target.shape)
    params["dst"] = target.memory.address + target.offset
    params["src"] = source.memory.address + source.offset
    params["element"], params["count"] = target.dtype.itemsize, target.size
    params["shape"] = (1,) * pad + target.shape
    params["to"] = (0,) * pad + target.strides
    params["from"] = (0,) * pad + source.strides
    return min(-(-target.size // THREADS), 4096)


def _overlap(one: View, other: View) -> bool:
    """Return whether the byte ranges of two views overlap; by address, as two memories may be one."""
    (begin, end), (first, last) = one.bounds(), other.bounds()
    apart = one.memory.address - other.memory.address
    return begin + apart < last and first < end + apart
