"""The device: "device memory" is an anonymous mapping, and three functions at the top stand for a driver's calls."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hal_core.base import DeviceBase
from hal_core.capabilities import Capabilities
from hal_core.device import Device, Stream
from hal_core.errors import DeviceClosed, InvalidValue
from hal_core.layout import ByteRange
from hal_core.markers import hookimpl
from hal_core.plan import WritePlan, apply_to_host
from hal_core.sync import SyncStream
from hal_core.tickets import DONE, Ticket
from hal_core.transfers import CopyTicket, HostCopy
from hal_core.values import Value
from hal_core.views import Memory, View

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ArenaMemory:
    """A block of device memory: what :class:`hal_core.views.Memory` asks for, and the driver's own handle."""

    def __init__(self, device: object, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self.mapping = mmap.mmap(-1, max(nbytes, 1))  # allocate: page-aligned, contents undefined
        self.bytes: Bytes = np.frombuffer(self.mapping, np.uint8)[:nbytes]
        self.address = self.bytes.ctypes.data


class ArenaDevice(DeviceBase):
    """What moves bytes, and nothing else: DeviceBase writes the four hooks and ``advance`` in terms of it."""

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
        if index != 0 or options:
            raise InvalidValue(f"arena:{index} with {dict(options)}", cure="open arena:0 without options")
        super().__init__(index)
        self._stream, self._closed = SyncStream(0), False

    @property
    def default_stream(self) -> Stream:
        """The stream on which the framework computes."""
        return self._stream

    def stream(self) -> Stream:
        """A new stream."""
        return SyncStream(1)

    def allocate(self, nbytes: int) -> ArenaMemory:
        """A block of device memory, at least 64-byte aligned."""
        self._check()
        self.count("allocations")
        return ArenaMemory(self, nbytes)

    def resolve(self, target: object) -> View:
        """A view of a framework's tensor on the device: this one has no framework, and takes views alone."""
        if isinstance(target, View):
            return target
        raise InvalidValue(
            f"{type(target).__name__} is no tensor of this device", cure="give a view of a state", argument="target"
        )

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan: what a device must do with it is what ``apply_to_host`` does."""
        self._check()
        apply_to_host(plan, _memory(plan.memory).bytes)
        self.count("launches")
        self.count("submissions")
        return DONE

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host."""
        self._check()
        self.count("copies_out", len(parts))
        return HostCopy([_memory(memory).bytes[part.offset : part.end].copy() for part in parts])

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Copy between two views of the device's memory, element by element."""
        source = _array(value).copy()
        _array(target)[...] = source.reshape(target.shape)
        return DONE

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """DeviceBase's, and counted: it is a fallback, and the kit asks for that (G7)."""
        self.count("fallbacks")
        return super().async_set_value(device, target, value, stream)

    def close(self) -> None:
        """Idempotent; memory that somebody still holds stays readable."""
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise DeviceClosed("the device is closed", cure="open it again", device="arena:0")


def _memory(memory: Memory) -> ArenaMemory:
    assert isinstance(memory, ArenaMemory)
    return memory


def _array(view: View) -> np.ndarray[Any, Any]:
    return np.ndarray(view.shape, view.dtype.storage, _memory(view.memory).bytes, view.offset, view.strides)
