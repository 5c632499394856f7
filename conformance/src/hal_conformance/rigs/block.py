"""A bare block of device memory with its expected bytes: the target of ``async_set_value`` tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core.errors import ConversionRefused
from hal_core.memory.dtypes import DType
from hal_core.memory.views import View
from hal_core.tickets import Ticket

from ..draw.views import BLOCK_BYTES, places
from ..harness import backdoor
from ..kit import Kit
from ..oracle.values import NAN, REFUSED, converted, same


class Block:
    """Device memory, filled with poison (or counting bytes starting at ``fill``), and its expected bytes."""

    def __init__(self, kit: Kit, fill: int | None = None, nbytes: int = BLOCK_BYTES) -> None:
        self.kit, self.device = kit, kit.device
        self.stream = self.device.default_stream
        self.memory = self.device.allocate(nbytes)
        self.should = backdoor.poisoned(nbytes)
        if fill is not None:
            self.should = ((np.arange(nbytes) // 8 + fill) % 2).astype(np.uint8)  # 0 and 1: valid bytes of any type
        self.any_nan: list[tuple[int, DType]] = []
        backdoor.write(self.device, self.memory, 0, self.should, self.stream)

    def view(self, shape: tuple[int, ...], dtype: DType) -> View:
        """Return a contiguous view at the block's beginning."""
        return View.contiguous(self.memory, 0, shape, dtype)

    def set(self, target: object, value: object) -> Ticket:
        """Call the hook under test."""
        return self.kit.bound.async_set_value(target=target, value=value, stream=self.stream)

    def expect(self, target: View, items: Sequence[Any]) -> None:
        """Expect these Python values in the target, converted by the oracle."""
        for at, item in zip(places(target), items, strict=True):
            found = converted(item, target.dtype)
            assert found != REFUSED, f"the kit expects {item!r} in {target.dtype}, which cannot be"
            self.any_nan = [(place, dtype) for place, dtype in self.any_nan if place != at]
            if isinstance(found, str):
                self.any_nan.append((at, target.dtype))
            else:
                self.should[at : at + len(found)] = list(found)

    def expect_bytes(self, target: View, elements: Sequence[bytes]) -> None:
        """Expect these elements in the target, as bytes."""
        for at, element in zip(places(target), elements, strict=True):
            self.should[at : at + len(element)] = list(element)

    def elements(self, view: View) -> list[bytes]:
        """Return the expected bytes of each element of a view of this block, in row-major order."""
        return [self.should[at : at + view.dtype.itemsize].tobytes() for at in places(view)]

    def set_if_convertible(self, target: View, value: object, items: Sequence[Any]) -> None:
        """Write the value. Assert that it is refused exactly if one of its items is, and then changes nothing."""
        __tracebackhide__ = True
        refused = [item for item in items if converted(item, target.dtype) == REFUSED]
        told: Exception | None = None
        try:
            self.set(target, value).wait(backdoor.PATIENCE)
        except ConversionRefused as error:
            told = error
        except Exception as error:
            raise AssertionError(
                f"{value!r} for {target}: raised {error!r}, which is not an error for a value"
            ) from error
        if told is not None:
            assert refused, f"{value!r} for {target.dtype} was refused ({told}), but every element converts"
            return
        assert not refused, f"{value!r} was written to {target.dtype}, but {refused[0]!r} must be refused"
        self.expect(target, items[: target.size])

    def check(self, after: str) -> None:
        """Compare every byte of the block, in stream order."""
        __tracebackhide__ = True
        self.compare(backdoor.read(self.device, self.memory, self.stream), after)

    def compare(self, got: backdoor.Bytes, after: str) -> None:
        """Compare read bytes with the expected ones."""
        __tracebackhide__ = True
        for at, dtype in self.any_nan:
            found = got[at : at + dtype.itemsize].tobytes()
            assert same(found, NAN, dtype), f"after {after}: byte {at} holds {found.hex()}, but should be a NaN"
            self.should[at : at + dtype.itemsize] = got[at : at + dtype.itemsize]
        wrong = np.flatnonzero(got != self.should)
        assert not len(wrong), (
            f"after {after}: byte {wrong[0]} is {got[wrong[0]]:#04x}, but should be {self.should[wrong[0]]:#04x}"
            f" ({len(wrong)} bytes differ: {wrong[:16].tolist()})"
        )
