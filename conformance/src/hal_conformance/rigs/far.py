"""A block of more than 4 GiB, of which a few windows are touched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hal_core.errors import OutOfMemory
from hal_core.memory.views import ByteRange, Memory, View

from ..harness import backdoor
from ..harness.backdoor import arrive
from ..harness.bits import noise
from ..kit import Kit

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket

if TYPE_CHECKING:
    pass

FAR = (5 << 30) + 4096
WINDOW = 4096
BORDERS = {"2 GiB": 1 << 31, "4 GiB": 1 << 32, "the end": FAR - WINDOW // 2}
"""Offsets at which a number of 31 or 32 bits ends. Only the windows around them are touched."""


def available() -> int:
    """Return the bytes of memory that this machine has available; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


class Far:
    """A block of more than 4 GiB of which some windows are poisoned, written and compared."""

    def __init__(self, kit: Kit, memory: Memory) -> None:
        self.kit, self.memory, self.stream = kit, memory, kit.device.default_stream
        low = {place - (1 << 32) for place in BORDERS.values()} | {0, 1 << 20}
        begins = {max(0, place - WINDOW // 2) for place in (*BORDERS.values(), *(at for at in low if at >= 0))}
        self.windows = {begin: backdoor.poisoned(WINDOW) for begin in sorted(begins)}
        self._fill()

    def _fill(self) -> None:
        runs = [(at, data.tobytes()) for at, data in self.windows.items()]
        arrive(backdoor.put(self.kit.device, self.memory, runs, self.stream))

    def tell_apart(self) -> None:
        """Give every window different bytes."""
        for begin in self.windows:
            self.windows[begin] = noise(begin, WINDOW)
        self._fill()

    def expect(self, offset: int, data: bytes) -> None:
        """Expect these bytes at ``offset`` from now on."""
        for begin, window in self.windows.items():
            if begin <= offset < begin + WINDOW:
                window[offset - begin : offset - begin + len(data)] = list(data)
                return
        raise AssertionError(f"byte {offset} is in no window")

    def check(self, after: str) -> None:
        """Compare all windows."""
        __tracebackhide__ = True
        self.compare(self.kit.device.copy_out(self.memory, self.parts(), self.stream), self.windows, after)

    def parts(self) -> list[ByteRange]:
        """Return the ranges of the windows."""
        return [ByteRange(begin, WINDOW) for begin in self.windows]

    def compare(self, copied: CopyTicket, begins: Iterable[int], after: str) -> None:
        """Compare the copied bytes of the windows that begin there."""
        __tracebackhide__ = True
        arrive(copied, "a copy to the host")
        for begin, got in zip(begins, copied.data, strict=True):
            should = self.windows[begin]
            wrong = np.flatnonzero(np.asarray(got) != should)
            assert not len(wrong), (
                f"after {after}: byte {begin + wrong[0]} is {got[wrong[0]]:#x}, not {should[wrong[0]]:#x}"
            )

    def set(self, target: View, value: object, elements_of: list[bytes]) -> None:
        """Set a value, and expect its elements at the addresses given by the view's numbers."""
        arrive(self.kit.bound.async_set_value(target=target, value=value, stream=self.stream))
        index = np.indices(target.shape).reshape(len(target.shape), -1).T.tolist()
        for at, element in zip(index, elements_of, strict=True):
            place = sum(i * stride for i, stride in zip(at, target.strides, strict=True))
            self.expect(target.offset + place, element)


def far_block(kit: Kit) -> Far:
    """Return the block if machine and device have room for it; else skip the test."""
    if available() < 2 * FAR:
        pytest.skip(f"needs {2 * FAR >> 30} GiB of free memory, to be safe with a block of {FAR >> 30} GiB")
    try:
        return Far(kit, kit.device.allocate(FAR))
    except (OutOfMemory, MemoryError) as error:
        why = type(error).__name__ if "\n" in str(error) else error  # a framework adds its own stack
        pytest.skip(f"needs a device with {FAR >> 30} GiB to give: {why}")
