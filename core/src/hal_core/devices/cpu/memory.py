"""Host memory: own blocks, the memory of tensors, and writing plans into them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import InvalidValue
from ...memory.copies import Bytes
from ...memory.dtypes import DType, dtype_of
from ...memory.foreign_tensors import HOST_OF_TORCH, check_resolved
from ...memory.views import View, extent
from ...slots.layout import ALIGNMENT

Structured = np.ndarray[Any, np.dtype[np.void]]

FILL_BYTES = 32 << 10
"""Bytes that one assignment fills at most."""


class HostMemory:
    """A block of host memory: ``buffer`` is uint8 ``[nbytes]`` over it; ``keep`` keeps its owner alive.

    ``spreader`` writes records into it; created with the first record.
    """

    __slots__ = ("__weakref__", "address", "buffer", "device", "keep", "nbytes", "spreader")

    def __init__(self, device: object, buffer: Bytes, keep: object) -> None:
        self.device, self.buffer, self.keep = device, buffer, keep
        self.nbytes = buffer.nbytes
        self.address = buffer.ctypes.data
        self.spreader: Spreader | None = None

    @property
    def host_bytes(self) -> memoryview:
        """The bytes themselves: the host may touch them at any time, as no work on them is ever pending."""
        return self.buffer.data

    @classmethod
    def allocate(cls, device: object, nbytes: int) -> HostMemory:
        """Return a new block on a cache-line boundary."""
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        return cls(device, raw[skip : skip + nbytes], raw)

    @classmethod
    def at(cls, device: object, address: int, nbytes: int, keep: object) -> HostMemory:
        """Return the memory of a foreign object, which ``keep`` keeps alive."""
        if nbytes == 0:
            return cls(device, np.zeros(0, np.uint8), keep)
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        return cls(device, np.ctypeslib.as_array(raw), keep)

    def write(self, writes: Structured, payload: Bytes) -> None:
        """Execute the descriptors of a plan (:data:`hal_core.memory.plan.WRITE`)."""
        target, given, cycle, known = self.buffer.data, payload.data, _cycle(0), 0
        for dst, source, nbytes, pattern_bytes in writes.tolist():
            if pattern_bytes == 0:
                target[dst : dst + nbytes] = given[source : source + nbytes]
                continue
            if source != known:
                cycle, known = _cycle(source), source
            while nbytes > FILL_BYTES:
                target[dst : dst + FILL_BYTES] = cycle
                dst, nbytes = dst + FILL_BYTES, nbytes - FILL_BYTES
            target[dst : dst + nbytes] = cycle[:nbytes]


@lru_cache(64)
def _cycle(source: int) -> memoryview:
    """Return :data:`FILL_BYTES` bytes of the 8-byte cycle ``source``, kept because resets use few patterns."""
    return memoryview(source.to_bytes(8, "little") * (FILL_BYTES // 8))


class Spreader:
    """Writes packed records into one state's fields in ``memory``, with a typed view of each field, made once."""

    def __init__(self, memory: HostMemory, scatter_map: Structured) -> None:
        self.scatter_map = scatter_map
        self.targets: list[tuple[str, Bytes]] = []
        names, formats, offsets = [], [], []
        end = 0
        for at, (base, stride, source, nbytes) in enumerate(scatter_map.tolist()):
            word = np.dtype(f"<u{nbytes}") if nbytes in (1, 2, 4, 8) else np.dtype(f"V{nbytes}")
            slots = (memory.nbytes - base - nbytes) // stride + 1
            column = np.ndarray((slots,), word, memory.buffer.data, base, (stride,))  # a stride may have gaps
            names.append(f"f{at}")
            formats.append(word)
            offsets.append(source)
            self.targets.append((names[-1], column))
            end = max(end, source + nbytes)
        self.record = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})

    def write(self, slots: np.ndarray[Any, np.dtype[np.int32]], data: Bytes) -> None:
        """Put record i, uint8 ``data[i]``, into slot ``slots[i]``."""
        records = np.ascontiguousarray(data[:, : self.record.itemsize]).view(self.record)[:, 0]
        for name, column in self.targets:
            column[slots] = records[name]


def resolve_host(device: object, target: Any) -> View:  # noqa: ANN401 (any framework's tensor)
    """Return a view over a NumPy array, or a tensor of Paddle or torch in host memory, by its address and strides.

    Raises :class:`InvalidValue` for other objects.
    """
    if isinstance(target, np.ndarray):
        return _resolve_array(device, target)
    check_resolved(target, "target")
    strides = getattr(target, "strides", None) or getattr(target, "stride", None)
    where = getattr(target, "place", None) or getattr(target, "device", None)
    if where is None or strides is None or not hasattr(target, "data_ptr"):
        raise InvalidValue(
            f"{type(target).__name__} is not a tensor of this device",
            cure="give a view of a state, a NumPy array, or a tensor of Paddle or torch in host memory",
            argument="target",
        )
    if not (where.is_cpu_place() if hasattr(where, "is_cpu_place") else where.type == HOST_OF_TORCH):
        raise InvalidValue(
            f"the tensor is on {where}, not on the host", cure="open the device that holds it", argument="target"
        )
    shape, dtype, address = tuple(target.shape), dtype_of(str(target.dtype)), int(target.data_ptr())
    if not address and 0 not in shape:
        raise InvalidValue("the tensor has no memory", cure="give one with values", argument="target")
    steps = tuple(step * dtype.itemsize for step in (strides() if callable(strides) else strides))
    return _foreign(device, address, shape, steps, dtype, target)


def _resolve_array(device: object, target: np.ndarray[Any, Any]) -> View:
    if not target.flags.writeable:
        raise InvalidValue("the array is read-only", cure="give a writable one", argument="target")
    return _foreign(device, target.ctypes.data, target.shape, target.strides, dtype_of(target.dtype), target)


def _foreign(
    device: object, address: int, shape: Sequence[int], strides: Sequence[int], dtype: DType, keep: object
) -> View:
    """Return a view at ``address``; its memory is limited to the view's own bounds."""
    low, end = extent(shape, strides, dtype.itemsize)
    memory = HostMemory.at(device, address + low, end - low, keep)
    return View(memory, -low, tuple(shape), tuple(strides), dtype)
