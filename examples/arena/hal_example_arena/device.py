"""The device. An anonymous mapping takes the place of a driver's memory."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hal_core import DONE, ByteRange, Capabilities, Stream, Ticket
from hal_core.devices import (
    CopyTicket,
    HostCopy,
    Memory,
    SyncDevice,
    WritePlan,
    apply_to_host,
    check_index,
    check_options,
)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ArenaMemory:
    """A block of device memory: what :class:`hal_core.memory.views.Memory` requires, and the driver's own handle."""

    def __init__(self, device: object, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.mapping = mmap.mmap(-1, max(nbytes, 1))  # allocate: page-aligned, contents undefined
        self.bytes: Bytes = np.frombuffer(self.mapping, np.uint8)[:nbytes]
        self.address = self.bytes.ctypes.data


class ArenaDevice(SyncDevice):
    """The primitives that move bytes; the base class implements the four hooks and ``update_inputs`` with them."""

    name = "arena"
    capabilities = Capabilities(
        async_h2d=False,  # with true, writes return before the device has done them (and G3 is checked)
        async_d2h=False,
        fused_scatter=True,  # a plan is at most two submissions, whatever it holds (G10)
        pinned_host=False,
        can_hold_stream=False,
        collective="",
        fallbacks={"async_set_value": "there is no queue to put a write on, so it is done on return"},
    )

    def __init__(self, index: int, options: Mapping[str, object]) -> None:
        check_index(self.name, index, 1)
        check_options(self.name, options)
        super().__init__(index)

    def allocate(self, nbytes: int) -> ArenaMemory:
        """A block of device memory, at least 64-byte aligned."""
        self.check_open()
        self.count("allocations")
        return ArenaMemory(self, nbytes)

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan: the device must do the same as ``apply_to_host``."""
        self.check_open()
        apply_to_host(plan, _bytes(plan.memory))
        self.count("launches")
        self.count("submissions")
        return DONE

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host."""
        self.check_open()
        self.count("copies_out", len(parts))
        return HostCopy([_bytes(memory)[part.offset : part.end].copy() for part in parts])


def _bytes(memory: Memory) -> Bytes:
    assert isinstance(memory, ArenaMemory)
    return memory.bytes
