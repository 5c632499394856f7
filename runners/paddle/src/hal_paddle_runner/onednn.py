"""oneDNN's C functions, by ctypes: matrix products with packed weights and fused ends, and softmax.

The library is the one in Paddle's wheel; Paddle itself is not imported. A :class:`Kernel` is made once for its shapes;
``execute(*call)`` is then one foreign call on fixed memory, which returns 0 or an error's number.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Call: TypeAlias = "tuple[c_void_p, c_void_p, int, c_void_p]"
Execute: TypeAlias = Callable[[c_void_p, c_void_p, int, c_void_p], int]
NAME, MAJOR = "libdnnl.so.3", 3

# Constants of dnnl_types.h.
_CPU, _IN_ORDER, _F32, _ANY, _INFERENCE = 1, 1, 3, 1, 96
_SRC, _WEIGHTS, _DST, _BIAS, _SCRATCH, _POST, _SRC_1, _OURS = 1, 33, 17, 41, 80, 32768, 2, 1
_SWISH, _SOFTMAX, _ADD, _MUL = 0x2C, 0x30000, 0x1FFF0, 0x1FFF1
_NAME_OF, _WEIGHTS_OF, _SCRATCH_OF = 8, 131, 136


class Unsuitable(Exception):
    """The library is missing, or would run a product by its reference code, a thousand times slower; the message says
    which."""


class _Argument(ctypes.Structure):
    _fields_ = (("kind", c_int), ("memory", c_void_p))


class Handle:
    """An object of the library's, destroyed with this one. ``kept``: what it points to. A kernel has the layout
    that it wants ``weights`` in, and that of its working memory."""

    __slots__ = ("_destroy", "kept", "raw", "scratch", "weights")
    weights: Handle
    scratch: Handle

    def __init__(self, destroy: Callable[[c_void_p], object], kept: object = None) -> None:
        self.raw, self._destroy, self.kept = c_void_p(), destroy, kept

    def __del__(self) -> None:
        if self.raw:
            self._destroy(self.raw)


Kernel: TypeAlias = Handle
Memory: TypeAlias = Handle
Layout: TypeAlias = Handle


def library_path() -> Path:
    """Return where Paddle's wheel has the library. Raises :class:`Unsuitable` without Paddle."""
    found = find_spec("paddle")
    if found is None or found.origin is None:
        raise Unsuitable("paddle is not installed")
    return Path(found.origin).parent / "libs" / NAME


def open_library(path: Path) -> OneDnn:
    """Return the library for one thread at a time; raises :class:`Unsuitable` if it cannot be used."""
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unsuitable(f"Paddle's wheel has no usable {NAME} ({error})") from None
    version = found.dnnl_version
    version.restype = ctypes.POINTER(c_int)
    if (major := version()[0]) != MAJOR:
        raise Unsuitable(f"{NAME} is of version {major}, not {MAJOR}")
    return OneDnn(found)


class OneDnn:
    """The library, with its engine and its stream, which computes inside the call."""

    def __init__(self, found: Any) -> None:  # noqa: ANN401 (a library)
        self._all, self._thread = found, 0
        self.enter()
        found.dnnl_primitive_desc_query_md.restype = c_void_p
        found.dnnl_memory_desc_get_size.restype = c_size_t
        self.execute: Execute = found.dnnl_primitive_execute
        found.dnnl_primitive_execute.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
        found.dnnl_memory_set_data_handle.argtypes = [c_void_p, c_void_p]
        engine = self._made("engine", "engine_create", _CPU, c_size_t(0))
        stream = self._made("stream", "stream_create", engine.raw, c_uint(_IN_ORDER))
        self._kept, self._engine, self._stream = (engine, stream), engine.raw, stream.raw
        self._scratch, self.names = aligned(0), set[str]()
        """``names``: of the implementations of all kernels that were made."""
        self.check(found.dnnl_set_primitive_cache_capacity(0))  # it would keep a thousand, of 280 KB each

    def enter(self) -> None:
        """Compute in the calling thread from now on, without further ones unless OMP_NUM_THREADS is set: they wait in a
        loop for the next call, for longer than a small model's step takes."""
        if (thread := threading.get_ident()) != self._thread:
            self._thread = thread
            if "OMP_NUM_THREADS" not in os.environ and hasattr(self._all, "omp_set_num_threads"):  # built with OpenMP
                self._all.omp_set_num_threads(1)

    def _made(self, kind: str, create: str, *arguments: object, kept: object = None) -> Handle:
        """Return the object that a function of the library writes to its first argument."""
        made = Handle(getattr(self._all, f"dnnl_{kind}_destroy"), kept)
        self.check(getattr(self._all, f"dnnl_{create}")(byref(made.raw), *arguments))
        return made

    def check(self, status: int) -> None:
        """Raise :class:`RuntimeError` for another status than 0."""
        if status:
            raise RuntimeError(f"oneDNN answered {status} (dnnl_status_t)")

    def layout(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> Layout:
        """Return the layout of a float32 array; ``strides`` in elements, None: as the library likes it."""
        dims, create = (c_int64 * 12)(*shape), "memory_desc_create_with_"
        if strides is None:
            return self._made("memory_desc", f"{create}tag", len(shape), dims, _F32, _ANY)
        return self._made("memory_desc", f"{create}strides", len(shape), dims, _F32, (c_int64 * 12)(*strides))

    def layout_of(self, array: Floats) -> Layout:
        """Return an array's own layout."""
        return self.layout(array.shape, [stride // 4 for stride in array.strides])

    def memory(self, layout: Layout, array: Floats) -> Memory:
        """Return an array's memory, seen in a layout."""
        address = c_void_p(array.ctypes.data)
        return self._made("memory", "memory_create", layout.raw, self._engine, address, kept=(layout, array))

    def move(self, memory: Memory, array: Floats) -> None:
        """Let a memory be another array's, in the same layout. The caller keeps the array."""
        self.check(self._all.dnnl_memory_set_data_handle(memory.raw, array.ctypes.data))

    def product(self, x: Layout, weights: Layout, y: Layout, ends: Sequence[str] = (), *extra: Layout) -> Kernel:
        """Return ``y = ends(x @ weights)``.

        ``ends``: "bias" (a row; it must be the first), "sum" (with what is in ``y``), "silu", and "add" or "mul" with
        an array of the result's shape; ``extra`` has the layouts of the bias and of these arrays, in order.
        """
        layouts = list(extra)
        bias = layouts.pop(0) if "bias" in ends else None
        posts = self._made("post_ops", "post_ops_create")
        for end in ends:
            if end == "sum":
                self.check(self._all.dnnl_post_ops_append_sum(posts.raw, c_float(1), 0, 0))
            elif end == "silu":
                self.check(self._all.dnnl_post_ops_append_eltwise(posts.raw, _SWISH, c_float(1), c_float(0)))
            elif end in ("add", "mul"):
                kind = _ADD if end == "add" else _MUL
                self.check(self._all.dnnl_post_ops_append_binary(posts.raw, kind, layouts.pop(0).raw))
        attributes = self._made("primitive_attr", "primitive_attr_create")
        self.check(self._all.dnnl_primitive_attr_set_post_ops(attributes.raw, posts.raw))
        self.check(self._all.dnnl_primitive_attr_set_scratchpad_mode(attributes.raw, _OURS))  # each would have its own
        wanted = (x.raw, weights.raw, None if bias is None else bias.raw, y.raw, attributes.raw)
        return self._kernel("matmul_primitive_desc_create", self._engine, *wanted)

    def softmax(self, layout: Layout, axis: int) -> Kernel:
        """Return softmax over an axis, in place."""
        wanted = (_INFERENCE, _SOFTMAX, layout.raw, layout.raw, axis, None)
        return self._kernel("softmax_forward_primitive_desc_create", self._engine, *wanted)

    def _kernel(self, create: str, *wanted: object) -> Kernel:
        described = self._made("primitive_desc", create, *wanted)
        kernel = self._made("primitive", "primitive_create", described.raw, kept=described)
        name = c_char_p()
        self.check(self._all.dnnl_primitive_desc_query(described.raw, _NAME_OF, 0, byref(name)))
        self.names.add((name.value or b"").decode())
        kernel.weights, kernel.scratch = Handle(bool, described), Handle(bool, described)  # the description's own
        for layout, what in ((kernel.weights, _WEIGHTS_OF), (kernel.scratch, _SCRATCH_OF)):
            layout.raw = c_void_p(self._all.dnnl_primitive_desc_query_md(described.raw, what, 0))
        return kernel

    def call(self, kernel: Kernel, x: Memory, weights: Memory | None, y: Memory, **extra: Memory) -> Call:
        """Return what :attr:`execute` takes. ``extra``: "bias", or the array of an end, by its place as "end0". It
        keeps all of them."""
        given = [(_SRC, x), (_DST, y)] if weights is None else [(_SRC, x), (_WEIGHTS, weights), (_DST, y)]
        for name, memory in extra.items():
            kind = _BIAS if name == "bias" else _POST * (int(name.removeprefix("end")) + 1) | _SRC_1
            given.append((kind, memory))
        if size := self._all.dnnl_memory_desc_get_size(kernel.scratch.raw):
            if size > self._scratch.nbytes:
                self._scratch = aligned(size // 2)  # twice as much, in numbers of 4 bytes
            given.append((_SCRATCH, self.memory(kernel.scratch, self._scratch)))
        array = (_Argument * len(given))(*[_Argument(kind, memory.raw) for kind, memory in given])
        address = ctypes.cast(array, c_void_p)
        address.kept = (array, kernel, given)  # type: ignore[attr-defined]
        return kernel.raw, self._stream, len(given), address

    def packed(self, array: Floats, layout: Layout) -> Memory:
        """Return a copy of a matrix in another layout."""
        size, own = self._all.dnnl_memory_desc_get_size(layout.raw), self.layout_of(array)
        copy = self.memory(layout, aligned(-(-size // 4)))
        reorder = self._kernel("reorder_primitive_desc_create", own.raw, self._engine, layout.raw, self._engine, None)
        self.check(self.execute(*self.call(reorder, self.memory(own, array), None, copy)))
        return copy


def aligned(*shape: int) -> Floats:
    """Return a new array, of zeros, whose memory begins at a cache line."""
    count = math.prod(shape)
    raw = np.zeros(count * 4 + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + count * 4].view(np.float32).reshape(shape)
