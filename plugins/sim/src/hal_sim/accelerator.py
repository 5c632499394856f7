"""The simulated accelerator as Python objects, over the library that Paddle's device uses as well.

It needs no Paddle. Under Paddle both use the same memory and streams: ``Stream.adopt`` takes the ``raw_stream`` of a
Paddle stream, and the address of a Paddle tensor is an address of this device.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_core import InvalidValue
from numpy.typing import NDArray

from hal_sim import _native
from hal_sim._native import MAX_RANK, KernelFunction, native
from hal_sim.records import Operation, Reader, Report
from hal_sim.settings import get_option
from hal_sim.streams import Closing, Event, Stream, milliseconds

FRESH_POISON, FREED_POISON, PENDING_POISON = 0xCB, 0xDD, 0xA5

# One entry of a write plan (fill 0: copy from the payload at offset `source`; 1, 2, 4, 8: repeat the low bytes of
# `source`), and one field of a slot table.
WRITE = np.dtype([("target", "<u8"), ("source", "<u8"), ("nbytes", "<u4"), ("fill", "<u4")])
FIELD = np.dtype([("base", "<u8"), ("stride", "<u8"), ("offset", "<u4"), ("nbytes", "<u4")])

_H2D, _D2H, _D2D, _P2P = range(4)


class PinnedMemory(Closing):
    """Host memory that asynchronous copies read and write when they run."""

    def __init__(self, nbytes: int) -> None:
        self._native = native()
        address = ctypes.c_void_p()
        self._native.check(self._native.pin(nbytes, ctypes.byref(address)))
        self.address: int = address.value or 0
        self.nbytes = nbytes
        # After close() the bytes stay readable for a while and contain poison.
        buffer = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array(buffer)

    def close(self) -> None:
        if self.address:
            self._native.check(self._native.unpin(self.address))
            self.address = 0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Packed records for some slots. All are addresses in device or pinned memory: ``records`` of ``count`` times
    ``record_nbytes``, ``slots`` one index of ``slot_nbytes`` each, ``fields`` the map (`FIELD`). ``base`` is added to
    every field's base; a slot at or beyond ``slot_limit`` is a fault."""

    records: int
    record_nbytes: int
    count: int
    slots: int
    fields: int
    field_count: int
    slot_limit: int
    slot_nbytes: int = 4
    base: int = 0

    def _native(self) -> _native.Spread:
        return _native.Spread(
            self.records, self.record_nbytes, self.count, self.slots, self.slot_nbytes,
            self.field_count, self.fields, self.slot_limit, self.base,
        )  # fmt: skip


_NO_RECORDS = Spread(records=0, record_nbytes=0, count=0, slots=0, fields=0, field_count=0, slot_limit=0)


class Accelerator:
    """One simulated device. Addresses are plain integers, so that they mix with those of tensors and plans.

    Several objects for one device share it. Counters, trace, reports, options and ``reset`` belong to the process.
    """

    def __init__(self, device: int = 0) -> None:
        self._native = native()
        count = get_option("devices")
        if not 0 <= device < count:
            raise InvalidValue(
                f"device {device} does not exist, there are {count}", cure="raise the option devices", device="sim"
            )
        self.device = device
        self._reader = Reader(self._native)

    # ---- memory ----
    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, filled with poison; the host cannot touch it."""
        address = ctypes.c_void_p()
        self._native.check(self._native.allocate(self.device, nbytes, ctypes.byref(address)))
        return address.value or 0

    def free(self, address: int) -> None:
        self._native.check(self._native.free(self.device, address))

    def pinned(self, nbytes: int) -> PinnedMemory:
        return PinnedMemory(nbytes)

    def is_pinned(self, address: int) -> bool:
        """Return whether the address lies in a pinned block."""
        return bool(self._native.is_pinned(address, 1))

    @property
    def memory_used(self) -> int:
        return int(self._native.memory_used(self.device))

    def peek(self, address: int, nbytes: int) -> bytes:
        """Return the bytes as they are now, through a back door: unordered, unchecked, untraced."""
        out = ctypes.create_string_buffer(nbytes)
        self._native.check(self._native.peek(out, address, nbytes))
        return out.raw

    def poke(self, address: int, data: bytes) -> None:
        self._native.check(self._native.poke(address, data, len(data)))

    # ---- streams and events ----
    def stream(self) -> Stream:
        return Stream.create(self.device)

    def event(self) -> Event:
        return Event()

    def synchronize(self, timeout: float | None = None) -> None:
        self._native.check(self._native.device_wait(self.device, milliseconds(timeout)))

    # ---- copies: host addresses or device addresses, in bytes ----
    def h2d(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        n = self._native
        n.check(n.copy_async(_H2D, stream.handle, self.device, -1, dst, src, nbytes))

    def d2h(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        n = self._native
        n.check(n.copy_async(_D2H, stream.handle, -1, self.device, dst, src, nbytes))

    def d2d(self, dst: int, src: int, nbytes: int, stream: Stream, *, src_device: int | None = None) -> None:
        """Copy within the device, or from another one with ``src_device``."""
        n, other = self._native, self.device if src_device is None else src_device
        route = _D2D if other == self.device else _P2P
        n.check(n.copy_async(route, stream.handle, self.device, other, dst, src, nbytes))

    def h2d_now(self, dst: int, src: int, nbytes: int) -> None:
        """Copy by the host, outside any stream's order."""
        self._native.check(self._native.copy_now(_H2D, self.device, -1, dst, src, nbytes))

    def d2h_now(self, dst: int, src: int, nbytes: int) -> None:
        self._native.check(self._native.copy_now(_D2H, -1, self.device, dst, src, nbytes))

    # ---- accesses by the host, for the checker ----
    def host_read(self, address: int, nbytes: int) -> None:
        self._native.check(self._native.host_access(address, nbytes, 0))

    def host_write(self, address: int, nbytes: int) -> None:
        self._native.check(self._native.host_access(address, nbytes, 1))

    def host_publish(self, token: int) -> None:
        """With the option ``host_threads``: order this thread's past before the thread that acquires the token."""
        self._native.host_publish(token)

    def host_acquire(self, token: int) -> None:
        self._native.host_acquire(token)

    # ---- kernels ----
    def scatter(
        self,
        block: int,
        block_nbytes: int,
        count: int,
        stream: Stream,
        *,
        table: int = 0,
        base: int = 0,
        payload: int = 0,
    ) -> None:
        """Apply the ``count`` entries (`WRITE`) at offset ``table`` of a staging block in device or pinned memory, in
        order. Sources count from offset ``payload`` of the block; ``base`` is added to every target."""
        n = self._native
        n.check(n.launch_scatter(stream.handle, block, block_nbytes, table, count, base, payload))

    def spread(self, call: Spread, stream: Stream) -> None:
        """Write the fields of each record to its slot."""
        self._native.check(self._native.launch_spread(stream.handle, ctypes.byref(call._native())))

    def plan(
        self,
        spread: Spread | None,
        block: int,
        block_nbytes: int,
        count: int,
        stream: Stream,
        *,
        table: int = 0,
        base: int = 0,
        payload: int = 0,
    ) -> None:
        """Run ``scatter_map`` and then ``scatter`` in one launch: a whole write plan."""
        first = (spread or _NO_RECORDS)._native()
        then = _native.Scatter(block, block_nbytes, table, count, base, payload)
        self._native.check(self._native.launch_plan(stream.handle, ctypes.byref(first), ctypes.byref(then)))

    def strided(
        self,
        *,
        dst: int,
        src: int,
        shape: Sequence[int],
        dst_strides: Sequence[int],
        src_strides: Sequence[int],
        item_nbytes: int,
        stream: Stream,
    ) -> None:
        """Copy an n-dimensional view; strides in bytes, may be negative."""
        rank = len(shape)
        if rank > MAX_RANK or len(dst_strides) != rank or len(src_strides) != rank:
            raise InvalidValue(
                f"shape {tuple(shape)} with strides {tuple(dst_strides)} and {tuple(src_strides)}",
                cure=f"give each of at most {MAX_RANK} dimensions one stride a side",
                device="sim",
            )
        longs = ctypes.c_int64 * MAX_RANK
        call = _native.Strided(dst, src, rank, item_nbytes, longs(*shape), longs(*dst_strides), longs(*src_strides))
        self._native.check(self._native.launch_strided(stream.handle, ctypes.byref(call)))

    def fill(self, dst: int, nbytes: int, pattern: int, pattern_nbytes: int, stream: Stream) -> None:
        n = self._native
        n.check(n.launch_fill(stream.handle, dst, nbytes, pattern, pattern_nbytes))

    def launch(self, name: str, arguments: bytes, stream: Stream) -> None:
        """Launch a kernel function of ``native/`` by its name; it gets a copy of the argument bytes."""
        n = self._native
        n.check(n.launch_function(stream.handle, name.encode(), arguments, len(arguments)))

    def launch_callable(self, function: Any, arguments: bytes, stream: Stream) -> None:  # noqa: ANN401
        """Launch a `KernelFunction` made from a Python callable; keep it alive until it has run."""
        if not isinstance(function, KernelFunction):
            raise InvalidValue("a kernel must be made with KernelFunction", cure="KernelFunction(f)", device="sim")
        n = self._native
        n.check(n.launch_pointer(stream.handle, function, arguments, len(arguments)))

    # ---- counters, trace, reports ----
    def counters(self) -> dict[str, int]:
        return self._reader.counters()

    def trace(self, after: int = 0) -> list[Operation]:
        """Return the operations after a sequence number, oldest first."""
        return self._reader.trace(after)

    def races(self) -> list[Report]:
        """Return the checker's reports since the last reset: races, and faults of lifetime, address and collectives."""
        return self._reader.reports()

    @property
    def dropped(self) -> tuple[int, int]:
        """Return how many trace records and reports were dropped for lack of room."""
        return int(self._native.dropped_records()), int(self._native.dropped_reports())

    def reset(self) -> None:
        """Clear trace, counters, reports and accesses. No work may be pending."""
        self._native.check(self._native.reset())


@contextlib.contextmanager
def label(text: str) -> Iterator[None]:
    """Name this thread's operations in traces and reports."""
    former = native().set_label(text.encode())
    try:
        yield
    finally:
        native().set_label(former)
