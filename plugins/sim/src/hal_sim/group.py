"""Groups of processes that communicate over shared memory, without Paddle."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
from hal_core import InvalidValue
from numpy.typing import DTypeLike

from hal_sim._native import native
from hal_sim.streams import Stream

_NAME_BYTES = 64

# The numbers are Paddle's; bfloat16 is 13 and has no NumPy type.
_TYPES = {
    "bool": 1, "uint8": 2, "uint16": 3, "uint32": 4, "uint64": 5, "int8": 6, "int16": 7, "int32": 8, "int64": 9,
    "float16": 10, "float32": 11, "float64": 12,
}  # fmt: skip


class Reduce(IntEnum):
    SUM = 0
    AVERAGE = 1
    MAXIMUM = 2
    MINIMUM = 3
    PRODUCT = 4


def new_group_name() -> str:
    """Return a new name that one rank makes and sends to the other ranks. Segments of ended processes are removed
    first."""
    out = ctypes.create_string_buffer(_NAME_BYTES)
    native().group_name(out, _NAME_BYTES)
    return out.value.decode()


class Group:
    """One rank's membership. Buffers are device addresses, counts are elements; every call only queues work on a
    stream.

    A lost, hung or disagreeing peer makes the waiting operation fail within the option ``collective_timeout_ms`` (read
    when the group is joined): the next wait for the device raises ``GroupLost``, and so does every later call.
    """

    def __init__(self, name: str, ranks: int, rank: int) -> None:
        """Wait for the other ranks to join."""
        self._native = native()
        self.name, self.ranks, self.rank = name, ranks, rank
        handle = ctypes.c_void_p()
        self._native.check(self._native.group_join(name.encode(), ranks, rank, ctypes.byref(handle)))
        self._handle: int = handle.value or 0

    def check(self) -> None:
        """Raise if the group is lost."""
        self._native.check(self._native.group_check(self._handle))

    def broadcast(self, address: int, count: int, dtype: DTypeLike, root: int, stream: Stream) -> None:
        self._call("broadcast", address, address, count, dtype, Reduce.SUM, root, stream)

    def all_reduce(
        self, src: int, dst: int, count: int, dtype: DTypeLike, stream: Stream, how: Reduce = Reduce.SUM
    ) -> None:
        self._call("all_reduce", src, dst, count, dtype, how, 0, stream)

    def reduce(
        self, src: int, dst: int, count: int, dtype: DTypeLike, root: int, stream: Stream, how: Reduce = Reduce.SUM
    ) -> None:
        self._call("reduce", src, dst, count, dtype, how, root, stream)

    def all_gather(self, src: int, dst: int, count: int, dtype: DTypeLike, stream: Stream) -> None:
        """Gather ``count`` elements of each rank."""
        self._call("all_gather", src, dst, count, dtype, Reduce.SUM, 0, stream)

    def reduce_scatter(
        self, src: int, dst: int, count: int, dtype: DTypeLike, stream: Stream, how: Reduce = Reduce.SUM
    ) -> None:
        """Reduce, and scatter ``count`` elements to each rank."""
        self._call("reduce_scatter", src, dst, count, dtype, how, 0, stream)

    def barrier(self, stream: Stream) -> None:
        self._call("barrier", 0, 0, 0, "uint8", Reduce.SUM, 0, stream)

    def send(self, address: int, nbytes: int, to: int, stream: Stream) -> None:
        self._native.check(self._native.transfer(self._handle, stream.handle, address, nbytes, to, 1))

    def receive(self, address: int, nbytes: int, source: int, stream: Stream) -> None:
        self._native.check(self._native.transfer(self._handle, stream.handle, address, nbytes, source, 0))

    def leave(self) -> None:
        """Leave the group; waiting peers are notified. Idempotent."""
        if self._handle:
            self._native.check(self._native.group_leave(self._handle))
            self._handle = 0

    def _call(
        self, name: str, src: int, dst: int, count: int, dtype: DTypeLike, how: Reduce, root: int, stream: Stream
    ) -> None:
        known = np.dtype(dtype).name
        if known not in _TYPES:
            raise InvalidValue(f"{known} cannot be communicated", cure=f"use one of {', '.join(_TYPES)}", device="sim")
        n, kind = self._native, _TYPES[known]
        n.check(n.collective(self._handle, stream.handle, name.encode(), src, dst, count, kind, how, root))
