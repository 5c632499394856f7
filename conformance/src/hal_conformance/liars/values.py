"""Liars about values: unusual floats, fields of less than a word, numbers beyond a double."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from hal_core.contract.markers import hookimpl
from hal_core.memory.plan import PlanBuilder, WritePlan
from hal_core.memory.views import View
from hal_core.runtime.policy import Policy
from hal_core.slots.tasks import TaskKind
from hal_core.tickets import Ticket

from . import Lie, liar
from .proxies import put

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.memory.dtypes import DType
    from hal_core.memory.values import Value
    from hal_core.memory.views import Memory
    from hal_core.slots.state import SlotState
    from hal_core.slots.tasks import TaskBatch
    from hal_core.streams import Stream

Array = np.ndarray[Any, Any]
EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
"""The bits of the exponent, all set in infinities and NaNs, none in denormals and zeros."""


class Values(Lie):
    """Base of liars that change the host values of ``async_set_value``."""

    def change(self, value: Array, dtype: DType, *, fills: bool) -> Array:
        """Return the value to write instead, of the same shape and storage; ``fills``: one element fills all."""
        return value

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write the changed value."""
        if not isinstance(value, View):
            fills = not isinstance(value, np.ndarray)
            changed = self.change(np.array(value), target.dtype, fills=fills)
            value = changed[()] if fills else np.ascontiguousarray(changed)
        return super().async_set_value(device, target, value, stream)  # type: ignore[misc,no-any-return]


class Floats(Values):
    """Base of liars that change floats by their bits."""

    def bits(self, bits: Array, sign: Array, exponent: int) -> Array:
        """Return the bits without sign to write instead; ``exponent`` masks its field."""
        return bits

    def change(self, value: Array, dtype: DType, *, fills: bool) -> Array:
        """Change floats, and leave other types unchanged."""
        if dtype.name not in EXPONENT:
            return value
        kind = np.dtype(f"u{dtype.itemsize}")
        raw = value.reshape(-1).view(kind)
        sign = raw & kind.type(1 << (8 * dtype.itemsize - 1))
        changed = self.bits(raw ^ sign, sign, EXPONENT[dtype.name])
        told: Array = (changed.astype(kind) | sign).view(value.dtype).reshape(value.shape)
        return told


@liar(6, "every NaN is written as the device's one NaN")
class CanonicalNaNs(Floats):
    """A conversion kernel between a type and itself."""

    def bits(self, bits: Array, sign: Array, exponent: int) -> Array:
        """The quiet NaN without payload."""
        quiet = exponent | (exponent & -exponent) >> 1
        return np.where(bits > exponent, bits.dtype.type(quiet), bits)


@liar(6, "denormals are flushed to zero", seen="builds with -ffast-math")
class FlushesDenormals(Floats):
    """Arithmetic without denormals."""

    def bits(self, bits: Array, sign: Array, exponent: int) -> Array:
        """Return zero where the exponent is zero."""
        return np.where(bits & bits.dtype.type(exponent) == 0, bits.dtype.type(0), bits)


@liar(6, "infinities are written as the largest finite value")
class InfinitiesClamped(Floats):
    """A conversion that saturates."""

    def bits(self, bits: Array, sign: Array, exponent: int) -> Array:
        """One less than infinity."""
        return np.where(bits == exponent, bits.dtype.type(exponent - 1), bits)


@liar(6, "a fill with zero is a memset, so the sign of a zero is lost")
class ZeroIsMemset(Values):
    """``if value == 0``."""

    def change(self, value: Array, dtype: DType, *, fills: bool) -> Array:
        """Return a zero without sign if it fills."""
        if (
            fills
            and dtype.name in EXPONENT
            and not int(value.reshape(1).view(f"u{dtype.itemsize}")[0]) << 1 & ((1 << 8 * dtype.itemsize) - 1)
        ):
            return np.zeros_like(value)
        return value


@liar(6, "64-bit integers go through doubles")
class LongsThroughDoubles(Values):
    """A generic kernel that computes in the widest float."""

    def change(self, value: Array, dtype: DType, *, fills: bool) -> Array:
        """Round to 53 bits."""
        if dtype.name not in ("int64", "uint64"):
            return value
        top = np.nextafter(2.0 ** (63 if dtype.name == "int64" else 64), 0)
        return np.minimum(value.astype(np.float64), top).astype(value.dtype)


@liar(6, "floats become bfloat16 by dropping the lower half")
class Bfloat16Truncates(Policy):
    """A shift without rounding to the nearest even."""

    def async_set_value(self, device: Device, hooks: Hooks, target: object, value: object, stream: Stream) -> Ticket:
        """Convert the values that the rules allow in this way."""
        view = target if isinstance(target, View) else device.resolve(target)
        floats = None if isinstance(value, View) or device.is_device_value(value) else np.array(value)
        if view.dtype.name != "bfloat16" or floats is None or floats.dtype not in (np.float32, np.float64):
            return super().async_set_value(device, hooks, target, value, stream)
        with np.errstate(all="ignore"):
            cut = (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

        return super().async_set_value(device, cast("Hooks", _Truncating(hooks, cut)), target, value, stream)


class _Truncating:
    """A hook that gets the truncated value instead of the converted one."""

    def __init__(self, hooks: Hooks, cut: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
        self._hooks, self._cut = hooks, cut

    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Call the honest hook with it."""
        cut = self._cut
        told = cut.reshape(value.shape) if isinstance(value, np.ndarray) else np.uint16(cut.reshape(-1)[0])
        given = value if isinstance(value, View) else told
        return self._hooks.async_set_value(device=device, target=target, value=given, stream=stream)


@liar(5, "single elements of two bytes are stored as words of four")
class HalfWordsAsWords(Lie):
    """Only elements that begin on a word: other ones would trap."""

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Write, and zero the other halves of the words."""
        ticket = super().async_set_value(device, target, value, stream)  # type: ignore[misc]
        offsets, nbytes = target.runs()
        if nbytes == 2 == target.dtype.itemsize:
            own = set(offsets.tolist())
            halves = [at + 2 for at in own if at % 4 == 0 and at + 4 <= target.memory.nbytes and at + 2 not in own]
            if halves:
                put(self, target.memory, [(at, b"\0\0") for at in halves], stream)
        return ticket  # type: ignore[no-any-return]


@liar(9, "a flag of one byte is written with its word, whose other flags are as they were at the last insertion")
class StopFlagsByTheWord(Lie):
    """A shadow of the flags on the host, since the device cannot store a byte."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert, then write the shadows of the neighbouring slots."""
        ticket = super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc]
        shadows = self.__dict__.setdefault("shadows", WeakKeyDictionary())
        shadow: Array = shadows.setdefault(state, np.ones(state.sizes.num_slots, np.bool_))
        place, named = state.layout.fields["stop_flags"], set(tasks.plain["slots"])
        for kind, slot in zip(tasks.plain["kinds"], tasks.plain["slots"], strict=True):
            shadow[slot] = kind in (TaskKind.PREEMPTED, TaskKind.ABORTED)
        words = sorted({slot // 4 for slot in named})
        beside = [at for word in words for at in range(4 * word, min(4 * word + 4, len(shadow))) if at not in named]
        if beside:
            put(self, state.memory, [(place.offset + at, shadow[at : at + 1].tobytes()) for at in beside], stream)
        return ticket  # type: ignore[no-any-return]


@liar(9, "denormal parameters of a request are flushed to zero")
class RecordsFlushDenormals(Lie):
    """A record scattered by a kernel for floats."""

    @hookimpl
    def insert_tasks(self, device: Device, state: SlotState, tasks: TaskBatch, stream: Stream) -> Ticket:
        """Insert with such a kernel."""
        fields: Any = state.layout.record_dtype.fields
        self.__dict__["floats"] = [entry[1] for entry in fields.values() if entry[0] == np.float32]
        try:
            return super().insert_tasks(device, state, tasks, stream)  # type: ignore[misc,no-any-return]
        finally:
            del self.__dict__["floats"]

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Flush them."""
        if plan.records is not None and "floats" in self.__dict__:
            data = plan.records.data.copy()
            for at in self.__dict__["floats"]:
                bits = np.ascontiguousarray(data[:, at : at + 4]).view(np.uint32)
                flushed = np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits).astype(np.uint32)
                data[:, at : at + 4] = flushed.view(np.uint8)
            plan = WritePlan(plan.memory, plan.writes, plan.pieces, replace(plan.records, data=data))
        return super().submit(plan, stream)  # type: ignore[misc,no-any-return]


@liar(1, "a tensor over a field is a copy of it", requires="tensors")
class TensorsAreCopies(Lie):
    """A tensor with the values of the moment."""

    def tensor(self, view: View, framework: str = "") -> object:
        """A clone (Paddle, torch) or copy (CuPy, NumPy) of the true one."""
        true: Any = super().tensor(view, framework)  # type: ignore[misc]
        return true.clone() if hasattr(true, "clone") else true.copy()


@liar(1, "a tensor's memory is somebody else's once its device is closed", requires="tensors")
class TensorsLoseTheirMemory(Lie):
    """A closed device's memory that is reused although a tensor over it exists."""

    _shown: Memory | None = None

    def tensor(self, view: View, framework: str = "") -> object:
        """Return the true tensor."""
        found: object = super().tensor(view, framework)  # type: ignore[misc]
        self._shown = view.memory
        return found

    def close(self) -> None:
        """Close, and overwrite the memory."""
        memory, self._shown = self._shown, None
        if memory is not None:
            builder = PlanBuilder(memory)
            builder.fill(np.array([0], np.int64), memory.nbytes, np.uint8(0xDD))
            device: Any = self
            device.submit(builder.build(), device.default_stream).wait()
        super().close()  # type: ignore[misc]
