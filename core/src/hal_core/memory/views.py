"""Views: strided parts of device memory, the targets of writes and the sources of copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_int
from typing import Any, Protocol

import numpy as np

from ..errors import InvalidValue
from . import dlpack
from .dtypes import DType


@dataclass(frozen=True, slots=True)
class ByteRange:
    """``nbytes`` bytes from ``offset`` of a block of device memory."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte after the range."""
        return self.offset + self.nbytes


Index = int | slice
NO_INDEX = "give a whole number or a slice; several slots: a slice, or one call each"
MOST_RUNS = 1 << 24
"""Most runs whose addresses are compared one by one if the strides alone do not show whether elements overlap."""


class Memory(Protocol):
    """A block of device memory. ``address`` is valid on the device only; the host must not dereference it."""

    @property
    def device(self) -> object:
        """The opened device that the memory belongs to."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


def extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return ``(low, end)``: the bytes of strided elements, relative to the first element; (0, 0) if there are no
    elements."""
    if 0 in shape:
        return 0, 0
    reach = [(count - 1) * step for count, step in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize


class View:
    """A strided view of device memory, a target of ``async_set_value``.

    ``offset`` and ``strides`` are bytes (strides may be negative), ``shape`` elements. ``state.view(name)`` and
    ``device.resolve(tensor)`` create views, and they are sliced as NumPy's are, by whole numbers and slices. ``host``
    caches the NumPy view of memory that the host may touch (the cpu device). ``owner``: the state whose field it is, if
    any: its writes wait for the state's readers.
    """

    __slots__ = ("_collapsed", "_known_apart", "dtype", "host", "memory", "offset", "owner", "shape", "strides")

    def __init__(
        self,
        memory: Memory,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        owner: object = None,
    ) -> None:
        self.memory, self.offset, self.shape, self.strides, self.dtype = memory, offset, shape, strides, dtype
        self.owner = owner
        self.host: np.ndarray[Any, Any] | None = None
        self._collapsed: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
        self._known_apart = False  # True once it is known that no two elements share a byte

    @classmethod
    def contiguous(
        cls, memory: Memory, offset: int, shape: tuple[int, ...], dtype: DType, owner: object = None
    ) -> View:
        """Return a view of ``shape`` contiguous elements in row-major order."""
        strides, step = [], dtype.itemsize
        for length in reversed(shape):
            strides.append(step)
            step *= length
        view = cls(memory, offset, shape, tuple(reversed(strides)), dtype, owner)
        view._known_apart = True
        return view

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> View:
        """Return a view of the part; a whole number drops its axis.

        :raises InvalidValue: out of bounds, and for lists, masks and other indices that NumPy's arrays take.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > len(self.shape):
            raise self._not_indexed(f"{len(parts)} indices", f"give at most {len(self.shape)}")
        offset, shape, strides = self.offset, [], []
        for axis, (length, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            part = parts[axis] if axis < len(parts) else slice(None)
            if isinstance(part, slice):
                start, stop, step = self._span(part, length)
                count = len(range(start, stop, step))
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(step * stride)
            else:
                at = self._number(part)
                if not -length <= at < length:
                    cure = f"give one from {-length} to {length - 1}" if length else "the axis is empty: give a slice"
                    raise self._not_indexed(f"index {at} on axis {axis}", cure)
                offset += (at % length) * stride
        view = View(self.memory, offset, tuple(shape), tuple(strides), self.dtype, self.owner)
        view._known_apart = self._known_apart
        return view

    def _span(self, part: slice, length: int) -> tuple[int, int, int]:
        try:
            return part.indices(length)
        except (TypeError, ValueError):  # no whole numbers, or a step of 0
            raise self._not_indexed(f"index {part!r}", NO_INDEX) from None

    def _number(self, part: object) -> int:
        try:
            if not isinstance(part, bool):
                return as_int(part)  # type: ignore[arg-type]  # any object: it raises
        except TypeError:
            pass
        raise self._not_indexed(f"index {part!r}", NO_INDEX)

    def _not_indexed(self, what: str, cure: str) -> InvalidValue:
        device: Any = self.memory.device
        place = f"{device.name}:{device.index}" if hasattr(device, "name") else ""
        return InvalidValue(f"{what} of a view of shape {self.shape}", cure=cure, device=place, argument="index")

    @property
    def elements_apart(self) -> bool:
        """Return whether no two elements share a byte, as those of an expanded or overlapping tensor do.

        Usually the strides show it; else the runs are compared. Computed once.
        """
        if not self._known_apart:
            self._known_apart = 0 in self.shape or self._strides_nest() or self._runs_differ()
        return self._known_apart

    def _strides_nest(self) -> bool:
        """Return whether every axis steps over all bytes of the axes with smaller strides: sufficient, but not
        necessary."""
        reach = self.dtype.itemsize
        for stride, length in sorted((abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1):
            if stride < reach:
                return False
            reach += (length - 1) * stride
        return True

    def _runs_differ(self) -> bool:
        """Compare the addresses of all elements. Interleaved axes may be disjoint although their strides do not
        nest."""
        low, high = self.bounds()
        if self.size * self.dtype.itemsize > high - low:
            return False
        if self.size > MOST_RUNS:
            raise InvalidValue(
                f"{self} has too many elements to compare one by one, and its strides do not show whether they overlap",
                cure=f"write it in parts of at most {MOST_RUNS} elements",
                argument="target",
            )
        offsets, nbytes = self.runs()
        return bool((np.diff(np.sort(offsets)) >= nbytes).all())

    def collapsed(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return ``(shape, strides, run)``: the outer axes that remain when adjacent bytes are joined to runs of
        ``run`` bytes.

        In row-major order over ``shape``, the runs are the view's elements in order. Computed once.
        """
        if self._collapsed is None:
            run, keep = self.dtype.itemsize, len(self.shape)
            while keep and (self.strides[keep - 1] == run or self.shape[keep - 1] == 1):
                run *= self.shape[keep - 1]
                keep -= 1
            outer = [pair for pair in zip(self.shape[:keep], self.strides[:keep], strict=True) if pair[0] != 1]
            self._collapsed = (tuple([pair[0] for pair in outer]), tuple([pair[1] for pair in outer]), run)
        return self._collapsed

    def runs(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
        """Return ``(offsets, nbytes)``: the view in row-major order as equal runs of adjacent bytes.

        ``offsets`` is int64 ``[runs]``, bytes into the memory; each run is ``nbytes`` long.
        """
        shape, strides, nbytes = self.collapsed()
        offsets = np.array([self.offset], np.int64)
        for length, stride in zip(shape, strides, strict=True):
            offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * stride).reshape(-1)
        if nbytes == 0:
            return np.empty(0, np.int64), 0
        return offsets, nbytes

    # -- for other libraries, in place --------------------------------------------------------------------------

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return ``(DLDeviceType, index)``. Raises :class:`BufferError` on a device unknown to DLPack."""
        device: Any = self.memory.device
        found: tuple[int, int] | None = getattr(device, "dlpack_device", None)
        if found is None:
            raise BufferError(f"{device.name}:{device.index} has no memory that DLPack can describe")
        return found

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule over the view's own memory, which is kept until the consumer releases it.

        :param stream: the consumer's stream, which waits for this device's queued work; -1: no order.
        :raises BufferError: for a copy or another device, where ``__dlpack_device__`` raises, and for strides that are
            no multiple of the element size, which DLPack cannot express.
        :raises DeviceClosed: after the device was closed.
        """
        place = self.__dlpack_device__()
        if copy or (dl_device is not None and tuple(dl_device) != place):
            raise BufferError(f"{self!r} is exported in place, on {place}, and not as a copy elsewhere")
        size = self.dtype.itemsize
        if any(step % size for count, step in zip(self.shape, self.strides, strict=True) if count > 1):
            raise BufferError(f"the strides of {self!r} are no multiples of the element size, in which DLPack counts")
        device: Any = self.memory.device
        device.check_open()
        device.before_consumer(stream)
        steps = [step // size for step in self.strides]
        address, versioned = self.memory.address + self.offset, max_version is not None and max_version[0] >= 1
        return dlpack.capsule(address, self.shape, steps, self.dtype, place, self, versioned=versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Interface of a view on a CUDA device (version 3); other views have no such attribute."""
        device: Any = self.memory.device
        if (getattr(device, "dlpack_device", None) or (0,))[0] != dlpack.DLPACK_CUDA:
            raise AttributeError(f"{device.name}:{device.index} has no memory that this interface can describe")
        device.check_open()
        return {
            "version": 3,
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.storage.str,
            "data": (self.memory.address + self.offset, False),
            "stream": device.default_stream.handle or 1,  # 0 is not allowed: 1 is CUDA's default stream
        }

    def bounds(self) -> tuple[int, int]:
        """Return ``(first, end)``: the smallest byte range of the memory that holds the view."""
        low, end = extent(self.shape, self.strides, self.dtype.itemsize)
        return self.offset + low, self.offset + end

    def __iter__(self) -> Iterator[View]:
        return (self[i] for i in range(self.shape[0]))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"View({self.dtype.name}{list(self.shape)} at byte {self.offset}, strides {self.strides})"
