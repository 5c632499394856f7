"""Liars about values: their bits and types, targets and strides, tensors of a framework."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from hal_core.devices.cpu.device import host_view
from hal_core.errors import HalError, InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import PlanBuilder
from hal_core.memory.views import View
from hal_core.slots.tasks import TaskKind

from ..harness.bits import to_bfloat16
from .proxies import HELD
from .rows import Call, How, first, instead, register, row, then

if TYPE_CHECKING:
    from hal_core.contract.device import Device, Hooks
    from hal_core.memory.dtypes import DType
    from hal_core.memory.values import Value
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

Array = np.ndarray[Any, Any]
EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}
"""The bits of the exponent, all set in infinities and NaNs, none in denormals and zeros."""
GRID = 65_535

# -- where a value lands ----------------------------------------------------------------------------------------------


def full_words(call: Call) -> None:
    offsets, nbytes = call.target.runs()
    memory = call.target.memory
    for end in [int(at) + nbytes for at in offsets]:
        if nbytes % 8 and end < memory.nbytes:
            call.write(memory, (end, b"\0"))


def as_integers(call: Call) -> None:
    memory, (_, end) = call.target.memory, call.target.bounds()
    if call.target.dtype.name == "bool" and call.target.size:
        call.write(memory, (end, bytes(min(3, memory.nbytes - end))))


def other_halves(call: Call) -> None:
    offsets, nbytes = call.target.runs()
    if nbytes == 2 == call.target.dtype.itemsize:
        own, memory = set(offsets.tolist()), call.target.memory
        halves = [at + 2 for at in own if at % 4 == 0 and at + 4 <= memory.nbytes and at + 2 not in own]
        if halves:
            call.write(memory, *[(at, b"\0\0") for at in halves])


def flags_of_the_word(call: Call) -> None:
    shadows = call.kept("shadows", WeakKeyDictionary())
    shadow: Array = shadows.setdefault(call.state, np.ones(call.state.sizes.num_slots, np.bool_))
    plain = call.tasks.plain
    place, named = call.state.layout.fields["stop_flags"], set(plain["slots"])
    for kind, slot in zip(plain["kinds"], plain["slots"], strict=True):
        shadow[slot] = kind in (TaskKind.PREEMPTED, TaskKind.ABORTED)
    words = sorted({slot // 4 for slot in named})
    others = [at for word in words for at in range(4 * word, min(4 * word + 4, len(shadow))) if at not in named]
    if others:
        call.write(call.state.memory, *[(place.offset + at, shadow[at : at + 1].tobytes()) for at in others])


def contiguous(view: View) -> View:
    """Return a view of as many elements, side by side, from a view's first one; the view itself if memory ends."""
    if view.offset + view.size * view.dtype.itemsize > view.memory.nbytes:
        return view
    return View.contiguous(view.memory, view.offset, view.shape, view.dtype)


def without_strides(call: Call) -> object:
    return call(target=contiguous(call.target))


def in_two_halves(call: Call) -> object:
    target, value = call.target, call.value
    if isinstance(value, View) and target.shape == value.shape and target.shape and target.shape[0] > 1:
        half = target.shape[0] // 2
        call(target=target[:half], value=value[:half])
        target, value = target[half:], value[half:]
    return call(target=target, value=value)


def first_of_the_grid(call: Call) -> object:
    count, rest = call.target.shape[0], GRID
    if len(call.target.shape) > 1:
        rest = max(1, GRID // (call.target.size // count))
    return call(target=call.target[:rest])


def windows_apart(call: Call) -> object:
    view = call()
    if all(step for step, count in zip(view.strides, view.shape, strict=True) if count > 1):
        view._known_apart = True
    return view


def by_first_element(call: Call) -> object:
    view = call()
    return call.kept("resolved", {}).setdefault((view.memory.address + view.offset, view.shape, view.dtype), view)


def through_a_known_view(call: Call) -> None:
    target = call.target
    if target.owner is not None:
        views = call.kept("known", WeakKeyDictionary()).setdefault(target.memory, {})
        target.host = views.setdefault((target.offset, target.shape, target.dtype), host_view(target))


def as_bytes(view: View) -> View:
    """Return the bytes from a view's first to its last, its gaps included."""
    low, end = view.bounds()
    return View.contiguous(view.memory, low, (end - low,), dtype_of("uint8"))


def on_whole_elements(view: View) -> View:
    """Return a view that begins on a multiple of its elements' size."""
    return View(view.memory, view.offset // view.dtype.itemsize * view.dtype.itemsize, view.shape, view.strides,
                view.dtype)  # fmt: skip


def without_gaps(call: Call) -> object:
    target = call.target
    low, end = target.bounds()
    together = min(target.strides, default=0) > 0 and end - low == target.size * target.dtype.itemsize
    if isinstance(call.value, np.ndarray) and together:
        target = View.contiguous(target.memory, low, target.shape, target.dtype, target.owner)
    return call(target=target)


def unturned(call: Call) -> None:
    element, low = np.asarray(call.value).tobytes(), call.target.bounds()[0]
    head = -low % len(element)
    if head and not call.target.collapsed()[0] and call.target.size > 1:
        count = call.target.size * len(element) - head
        call.write(call.target.memory, (low + head, (element * call.target.size)[:count]))


TARGETS = {
    "a target without gaps is written as if its elements lay in their order": row(
        "TurnedTargetsInOrder", 5, "async_set_value", without_gaps
    ),  # no gaps are taken for row-major
    "a value whose strides are the target's is copied with what lies between its elements": row(
        "EqualStridesInOnePiece",
        5,
        "async_set_value",
        lambda call: call(target=as_bytes(call.target), value=as_bytes(call.value)),
        when=lambda call: (
            isinstance(call.value, View)
            and call.target.size
            and call.value.shape == call.target.shape
            and call.value.strides == call.target.strides
        ),
    ),  # one copy from the first byte to the last
    "a value on the device goes to whole elements of the target's memory": row(
        "OntoWholeElements",
        5,
        "async_set_value",
        lambda call: call(target=on_whole_elements(call.target)),
        seen="hal's own device over Paddle",
        when=lambda call: isinstance(call.value, View),
    ),  # a scatter by the numbers of elements
    "a fill that begins off its elements' size goes on with words of the pattern as it is": row(
        "PatternUnturned",
        6,
        "async_set_value",
        then(unturned),
        when=lambda call: not isinstance(call.value, View | np.ndarray),
    ),  # aligned words behind a head of bytes
    "every write is rounded up to 8 bytes, over the neighbour": row(
        "WordsOnly", 5, "async_set_value", then(full_words)
    ),  # a kernel that writes whole words
    "strides are ignored: a strided target is written as if its elements lay side by side": row(
        "NoStrides", 5, "async_set_value", without_strides, seen="Paddle copy_"
    ),  # Paddle 3.0 and 3.1 did, on every device
    "a bool row is written as int32, four bytes an element": row(
        "BoolAsInt", 5, "async_set_value", then(as_integers)
    ),  # a kernel without bool
    "single elements of two bytes are stored as words of four": row(
        "HalfWordsAsWords", 5, "async_set_value", then(other_halves)
    ),  # only elements that begin on a word: other ones would trap
    "a flag of one byte is written with its word, whose other flags are as they were at the last insertion": row(
        "StopFlagsByTheWord", 9, "insert_tasks", then(flags_of_the_word)
    ),  # a shadow of the flags on the host, since the device cannot store a byte
    "a value on the device that is expanded is read as if it lay together": row(
        "ExpandedAsContiguous",
        5,
        "async_set_value",
        lambda call: call(value=contiguous(call.value)),
        when=lambda call: isinstance(call.value, View) and 0 in call.value.strides,
    ),  # strides of 0 are taken for none
    "a device value's stride of 0 means contiguous": row(
        "NoStrideIsContiguous",
        1,
        "copy_within",
        lambda call: call(value=contiguous(call.value)),
        HELD,
        when=lambda call: call.value.size > 1 and not any(call.value.strides),
    ),  # tensors without strides are contiguous in DLPack, and the kernel takes a stride of 0 for none
    "a value that overlaps its target is copied in two pieces": row(
        "OverlapsInPieces", 5, "async_set_value", in_two_halves
    ),  # the second piece is read when the first is written
    "a scalar fills the first 65,535 elements of its target": row(
        "FillsEndAt65535",
        6,
        "async_set_value",
        first_of_the_grid,
        when=lambda call: not isinstance(call.value, View | np.ndarray) and call.target.size > GRID,
    ),  # the limit of a grid
    "only a stride of 0 counts as overlapping": row(
        "WindowsAreWritten", 5, "resolve", windows_apart, ("tensors", "not async_h2d")
    ),  # a tensor of sliding windows is written
    "a tensor of an address, a shape and a type is the one resolved before": row(
        "ResolvedWithoutStrides", 5, "resolve", by_first_element, ("tensors", "not async_h2d")
    ),  # a[:4] and a[0:8:2]
    "a cache of NumPy views is keyed by offset and shape, not by strides": row(
        "CachesViewsWithoutStrides", 5, "async_set_value", first(through_a_known_view), "not async_h2d"
    ),  # a strided part of a field gets the places of a plain one
}
register(__name__, TARGETS)

# -- the bits of a value -----------------------------------------------------------------------------------------------


def valued(change: Callable[[Array, DType, bool], Array]) -> How:
    """Return a lie that changes host values: ``change(value, dtype, fills)``; ``fills``: one element fills all."""

    def lie(call: Call) -> object:
        if isinstance(call.value, View):
            return call()
        fills = not isinstance(call.value, np.ndarray)
        changed = change(np.array(call.value), call.target.dtype, fills)
        return call(value=changed[()] if fills else np.ascontiguousarray(changed))

    return lie


def floats(change: Callable[[Array, int], Array]) -> How:
    """Return a lie that changes floats: ``change(bits without sign, mask of the exponent)``."""

    def changed(value: Array, dtype: DType, _: bool) -> Array:
        if dtype.name not in EXPONENT:
            return value
        kind = np.dtype(f"u{dtype.itemsize}")
        raw = value.reshape(-1).view(kind)
        sign = raw & kind.type(1 << (8 * dtype.itemsize - 1))
        bits: Array = (change(raw ^ sign, EXPONENT[dtype.name]).astype(kind) | sign).view(value.dtype)
        return bits.reshape(value.shape)

    return valued(changed)


def canonical(bits: Array, exponent: int) -> Array:
    quiet = exponent | (exponent & -exponent) >> 1
    return np.where(bits > exponent, bits.dtype.type(quiet), bits)


def without_sign(value: Array, dtype: DType, fills: bool) -> Array:
    if not fills or dtype.name not in EXPONENT:
        return value
    bits = int(value.reshape(1).view(f"u{dtype.itemsize}")[0]) << 1 & ((1 << 8 * dtype.itemsize) - 1)
    return value if bits else np.zeros_like(value)


def through_doubles(value: Array, dtype: DType, _: bool) -> Array:
    if dtype.name not in ("int64", "uint64"):
        return value
    top = np.nextafter(2.0 ** (63 if dtype.name == "int64" else 64), 0)
    return np.minimum(value.astype(np.float64), top).astype(value.dtype)


def through_int32(call: Call) -> object:
    value = np.asarray(call.value).astype(np.int32).astype(np.int64)
    return call(value=value if value.ndim else value[()])


def refuse_arrays(call: Call) -> object:
    raise InvalidValue("arrays are not supported", cure="give a list", argument="value")


def by_the_low_word(call: Call) -> object:
    byte, *others = call.value.tobytes()[:4]
    if any(other != byte for other in others):
        return call()
    return call(value=np.frombuffer(bytes([byte]) * 8, np.int64)[0])


def cast(call: Call) -> object:
    try:
        with np.errstate(all="ignore"):
            value = np.asarray(call.value).astype(call.target.dtype.storage)
    except (TypeError, ValueError, OverflowError):
        return call()
    return call(value=value)


def rest_is_cast(call: Call) -> object:
    value, into = call.value, call.device.resolve(call.target).dtype
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind == "i" and into.kind == "int":
        rest = value[4096:].astype(into.storage).astype(value.dtype)
        value = np.concatenate([value[:4096], rest]).astype(value.dtype)
    return call(value=value)


class _Truncating:
    """A hook that gets the truncated value instead of the converted one."""

    def __init__(self, hooks: Hooks, cut: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
        self._hooks, self._cut = hooks, cut

    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Call the honest hook with it."""
        cut = self._cut
        other = cut.reshape(value.shape) if isinstance(value, np.ndarray) else np.uint16(cut.reshape(-1)[0])
        given = value if isinstance(value, View) else other
        return self._hooks.async_set_value(device=device, target=target, value=given, stream=stream)


def truncated(call: Call) -> object:
    target, value, device = call.target, call.value, call.device
    view = target if isinstance(target, View) else device.resolve(target)
    given = None if isinstance(value, View) or device.is_device_value(value) else np.array(value)
    if view.dtype.name != "bfloat16" or given is None or given.dtype not in (np.float32, np.float64):
        return call()
    with np.errstate(all="ignore"):
        cut = (given.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return call(hooks=_Truncating(call.hooks, cut))


BITS = {
    "every NaN is written as the device's one NaN": row(
        "CanonicalNaNs", 6, "async_set_value", floats(canonical)
    ),  # a conversion kernel between a type and itself
    "denormals are flushed to zero": row(
        "FlushesDenormals",
        6,
        "async_set_value",
        floats(lambda bits, exponent: np.where(bits & bits.dtype.type(exponent) == 0, bits.dtype.type(0), bits)),
        seen="builds with -ffast-math",
    ),
    "infinities are written as the largest finite value": row(
        "InfinitiesClamped",
        6,
        "async_set_value",
        floats(lambda bits, exponent: np.where(bits == exponent, bits.dtype.type(exponent - 1), bits)),
    ),  # a conversion that saturates
    "a fill with zero is a memset, so the sign of a zero is lost": row(
        "ZeroIsMemset", 6, "async_set_value", valued(without_sign)
    ),  # if value == 0
    "64-bit integers go through doubles": row(
        "LongsThroughDoubles", 6, "async_set_value", valued(through_doubles)
    ),  # a generic kernel that computes in the widest float
    "int64 goes through int32": row(
        "Int32Only",
        6,
        "async_set_value",
        through_int32,
        seen="FastDeploy 7648",
        when=lambda call: call.target.dtype.name == "int64" and isinstance(call.value, np.ndarray | np.generic),
    ),  # a kernel whose index and value type is int
    "a type check that accepts lists and numbers, but not arrays": row(
        "NoArrays",
        6,
        "async_set_value",
        refuse_arrays,
        seen="isinstance(x, np.array)",
        when=lambda call: isinstance(call.value, np.ndarray) and call.value.ndim > 1,
    ),
    "a large fill with a 64-bit integer is a memset if the bytes of its low word are equal": row(
        "MemsetByTheLowWord",
        6,
        "async_set_value",
        by_the_low_word,
        when=lambda call: isinstance(call.value, np.int64) and call.target.size >= 512,
    ),  # a test of 32 bits of the pattern
    "floats become bfloat16 by dropping the lower half": row(
        "Bfloat16Truncates", 6, "policy.async_set_value", truncated
    ),  # a shift without rounding to the nearest even
    "values are cast with NumPy, whatever is lost": row(
        "CastsAnything",
        6,
        "policy.async_set_value",
        cast,
        seen="every .astype(...) before a copy",
        when=lambda call: (
            isinstance(call.target, View) and not isinstance(call.value, View) and call.target.dtype.name != "bfloat16"
        ),
    ),
    "of an array, the first 4096 elements are checked": row(
        "LateElementsWrap", 6, "policy.async_set_value", rest_is_cast
    ),  # the rest is cast, as a sample has shown the class of the values
    "an error has a fact, but neither argument nor cure": row(
        "SaysNoCure", 26, "policy.async_set_value", instead(HalError, lambda error: type(error)(error.what))
    ),  # bare messages as errors
}
register(__name__, BITS)

# -- NaNs that are converted from type to type, and tensors of a framework ---------------------------------------------


def nans(source: type, target: str, words: Callable[[Array], Array]) -> How:
    """Return a lie about the conversion of NaNs from ``source`` to ``target``: they become ``words(bits)``."""

    def lie(call: Call) -> object:
        value, out = call.value, call()
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not isinstance(out, np.ndarray):
            return out
        flat = value.reshape(-1).astype(value.dtype.newbyteorder("="))
        places = np.flatnonzero(np.isnan(flat))
        if len(places) and len(flat) == out.size and call.target.dtype.name == target and flat.dtype == source:
            found = words(flat[places].view(f"u{flat.itemsize}"))
            out = out.copy()
            out.reshape(-1).view(found.dtype)[places] = found
        return out

    return lie


def upper_bits(bits: Array) -> Array:
    sign = (bits >> np.uint64(63)) << np.uint64(31)
    cut: Array = (sign | np.uint64(0x7F800000) | ((bits >> np.uint64(29)) & np.uint64(0x7FFFFF))).astype(np.uint32)
    return cut


def storage_of(call: Call) -> object:
    tensor: Any = call.tensor
    dtype = dtype_of(str(tensor.dtype))
    address, count = tensor.data_ptr(), tensor.numel()
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address))
    return raw.view(dtype.storage).reshape(tensor.shape).copy(), dtype


def has_layout(tensor: Any) -> bool:  # noqa: ANN401 (a framework's)
    return str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested


def copied(call: Call) -> object:
    true = call()
    return true.clone() if hasattr(true, "clone") else true.copy()


def note_memory(call: Call) -> None:
    call.me.__dict__["shown"] = call.view.memory


def overwrite_memory(call: Call) -> None:
    memory = call.me.__dict__.pop("shown", None)
    if memory is not None:
        builder = PlanBuilder(memory)
        builder.fill(np.array([0], np.int64), memory.nbytes, np.uint8(0xDD))
        call.me.submit(builder.build(), call.me.default_stream).wait()


CONVERSIONS = {
    "a NaN becomes bfloat16 by the rounding of numbers": row(
        "NaNsAreRounded",
        6,
        "conversion of a value",
        nans(np.float32, "bfloat16", to_bfloat16),
        seen="kernels that add 0x7fff and shift",
    ),  # a payload in the lower half is rounded away, one of all ones is carried into the sign
    "of a double's NaN the upper bits are kept, whatever is left of its payload": row(
        "NaNsAreCut", 6, "conversion of a value", nans(np.float64, "float32", upper_bits)
    ),  # a conversion by shifts for special values
    "a tensor that is lazily negated is written as its memory is": row(
        "NegativeBitIgnored",
        6,
        "elements of a host tensor",
        storage_of,
        seen="torch: z.conj().imag",
        when=lambda call: hasattr(call.tensor, "data_ptr") and call.tensor.is_neg(),
    ),  # data_ptr() is all that is asked
    "a sparse or quantized tensor is written as the memory of its values": row(
        "LayoutIgnored",
        6,
        "elements of a host tensor",
        storage_of,
        when=lambda call: hasattr(call.tensor, "data_ptr") and has_layout(call.tensor),
    ),  # no look at the layout
    "a tensor over a field is a copy of it": row(
        "TensorsAreCopies", 1, "tensor", copied, "tensors"
    ),  # a tensor with the values of the moment: a clone (Paddle, torch) or copy (CuPy, NumPy)
    "a tensor's memory is somebody else's once its device is closed": row(
        "TensorsLoseTheirMemory", 1, "tensor", then(note_memory), "tensors", also={"close": first(overwrite_memory)}
    ),  # a closed device's memory that is reused although a tensor over it exists
}
register(__name__, CONVERSIONS)
