"""Prepared calls with the bytes before and after them, and the forms of ``async_set_value``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View

from ..harness.backdoor import Bytes, arrive
from ..harness.bits import noise
from ..kit import Kit

if TYPE_CHECKING:
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


@dataclass
class Road:
    """One prepared call.

    - ``memory``: the memory it changes; ``before``: the bytes that must be there first.
    - ``sources``: other device memory that it reads, with the bytes that must be there first.
    - ``act``: makes the call on a stream, and updates the model.
    - ``wrong``: returns what is wrong with the bytes read after it, or "".
    - ``complete``: waits for the ticket, and checks its results besides the bytes.
    - ``after``: the bytes after the call, if known beforehand.
    """

    memory: Memory
    before: Bytes
    act: Callable[[Stream], Ticket]
    wrong: Callable[[Bytes], str]
    sources: Sequence[tuple[Memory, Bytes]] = ()
    complete: Callable[[Ticket], None] = field(default=lambda ticket: arrive(ticket, "the call"))
    after: Bytes | None = None


Make = Callable[[Kit], Road]


def unlike(got: Bytes, should: Bytes) -> str:
    """Return where bytes differ, or ""."""
    wrong = np.flatnonzero(got != should)
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(should)} bytes are wrong, the first is byte {at}: {got[at]:#04x}, not {should[at]:#04x}"
    )


SHAPE = (64, 96)
_ALL = slice(None)


@dataclass(frozen=True)
class Value:
    """A form of ``async_set_value``: a part of an array of ``shape``, and the value written there.

    ``value``: "scalar", "array", "list", "device" (a view of other memory) or an index (a view of the same memory).
    """

    part: tuple[int | slice, ...]
    value: str | tuple[slice, ...]
    dtype: str = "int64"
    shape: tuple[int, ...] = SHAPE

    def road(self, kit: Kit, memory: Memory | None = None, before: Bytes | None = None, seed: int = 1) -> Road:
        """Prepare the call, on the given memory or on new memory."""
        dtype = dtype_of(self.dtype)
        nbytes = int(np.prod(self.shape)) * dtype.itemsize
        memory = kit.device.allocate(nbytes) if memory is None else memory
        before = noise(seed, nbytes) if before is None else before
        after, sources = before.copy(), []
        whole = View.contiguous(memory, 0, self.shape, dtype)
        target, cells = whole[self.part], after.view(dtype.storage).reshape(self.shape)
        items = noise(seed + 1000, max(target.size, 1) * dtype.itemsize).view(dtype.storage)
        value: Any
        if self.value == "scalar":
            value = items[0].item()
            cells[self.part] = value
        elif self.value == "device":
            value = View.contiguous(kit.device.allocate(items.nbytes), 0, target.shape, dtype)
            sources.append((value.memory, items.view(np.uint8)))
            cells[self.part] = items.reshape(target.shape)
        elif isinstance(self.value, tuple):
            value = whole[self.value]
            cells[self.part] = cells[self.value].copy()
        else:
            value = items.reshape(target.shape)
            cells[self.part] = value
            value = value.tolist() if self.value == "list" else value

        def act(stream: Stream) -> Ticket:
            ticket = kit.bound.async_set_value(target=target, value=value, stream=stream)
            if isinstance(value, np.ndarray):
                value[...] = 0  # the caller may change it again (G2)
            return ticket

        return Road(memory, before, act, lambda got: unlike(got, after), sources, after=after)


VALUES: dict[str, Value] = {
    "one element": Value((3, 5), "scalar"),
    "a scalar that fills a row": Value((3,), "scalar"),
    "a scalar in a strided part": Value((slice(None, None, 2), slice(1, None, 3)), "scalar"),
    "a list": Value((0, slice(8, 16)), "list"),
    "a short array": Value((1, slice(8, 20)), "array"),
    "a long array": Value((slice(0, 60),), "array"),
    "a strided array": Value((slice(None, None, -2), slice(3, None, 7)), "array"),
    "a column of int32": Value((_ALL, 4), "array", "int32"),
    "a value on the device": Value((slice(10, 20),), "device"),
    "a strided value on the device": Value((slice(10, 20), slice(None, None, -5)), "device"),
    "a value of the same memory": Value((slice(0, 20),), (slice(10, 30),)),
}
"""Description to form. All fit many times into a staging ring of a few MiB."""

LARGE = Value((_ALL, slice(1, None)), "array", shape=(50, 1536))
"""600 KB that are not contiguous on the device."""
