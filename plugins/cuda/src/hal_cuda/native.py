"""The native part: whether it exists, whether it was built for this core, and its use.

``HAL_CUDA_NATIVE`` chooses: 0, the fallback; 1, refuse to open without the native part; unset, the native part if it
exists and fits, else the fallback.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import InvalidValue, SplitRole, TaskKind, Unavailable
from hal_core.devices import (
    ADMISSION_ID,
    BLOCKS,
    BLOCKS_HELD,
    CONFIG_KEY,
    PREFILLED,
    REQUEST_NAMES,
    REQUEST_ROW,
    ROW_FIELDS,
    SLOT_ADMISSION,
    TASK_NAMES,
    TOKENS,
    TOKENS_LEFT,
    TRAITS,
    NativeColumns,
)

from .building import sources_digest
from .structs import CHUNK_NUMBERS, ENTER, ENTRY, FEW_BYTES, PIECE, PLACE, THREADS

if TYPE_CHECKING:
    from hal_core import SlotState, TaskBatch

VARIABLE = "HAL_CUDA_NATIVE"
LIBRARY = "libcuda.so.1"
CURE = "install a C compiler and Python's headers, then: python -m hal_cuda.building"
CALLS = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemsetD32Async",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuGraphLaunch",
)
"""The driver's functions, in the order in which the native part takes them."""


def layout() -> str:
    """Return the values compiled into the native part, as the running core and this package have them: ``LAYOUT`` of
    native.h."""
    rows = f"rows {len(ROW_FIELDS)} {BLOCKS} {TOKENS}"
    table = f"table {PREFILLED} {SLOT_ADMISSION} {BLOCKS_HELD} {BLOCKS_HELD + 1}"
    request = f"request {ADMISSION_ID} {CONFIG_KEY} {TOKENS_LEFT} {REQUEST_ROW.itemsize // 8}"
    kernel = f"entry {ENTRY.size // 8} enter {ENTER.itemsize} few {FEW_BYTES} piece {PIECE} threads {THREADS}"
    traits = ", ".join([str(TRAITS.get(at, 0)) for at in range(max(TRAITS) + 1)])
    kinds = f"prefill {int(TaskKind.PREFILL)} traits {traits}"
    names = f"names {len(TASK_NAMES)} {len(REQUEST_NAMES)} {kinds}"
    return f"{rows} {table} {request} place {PLACE} chunk {CHUNK_NUMBERS} {kernel} {names}"


def refusal(module: Any) -> str:  # noqa: ANN401 (an extension module)
    """Return why a native part cannot be used with this package and this core; "" if it can."""
    if getattr(module, "SOURCES", "") != sources_digest():
        return "the native part was built for another version of paddle-hal-cuda"
    if layout() != module.LAYOUT:
        return "the native part was built for another version of paddle-hal-core"
    array = np.arange(9, dtype=np.int32)[2:5]
    if module.int32s(array, array.dtype, np.ndarray) != array.tobytes():
        return f"NumPy {np.__version__} lays out its arrays in another way than the native part reads them"
    return ""


def find() -> tuple[Any, str]:
    """Return the native part if it is wanted and fits, and ""; else None, and the reason for the fallback.

    Raises :class:`Unavailable` if ``HAL_CUDA_NATIVE=1`` and the native part cannot be used.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise InvalidValue(f"{VARIABLE}={wanted}", cure="give 0 or 1, or unset it", device="cuda", argument=VARIABLE)
    if wanted == "0":
        return None, f"{VARIABLE}=0"
    module, why = _look()
    if module is None and wanted:
        raise Unavailable(f"{VARIABLE}=1, but {why}", cure=CURE, device="cuda")
    return module, f"{why} ({CURE})" if why else ""


def _look() -> tuple[Any, str]:
    """Return the module, or None and the reason."""
    if find_spec("hal_cuda._native") is None:
        return None, "the native part was not built"
    try:
        module = import_module("hal_cuda._native")
    except ImportError as error:
        return None, f"the native part cannot be loaded: {error}"
    why = refusal(module)
    return (None, why) if why else (module, "")


def functions(library: ctypes.CDLL | None = None) -> tuple[int, ...]:
    """Return the addresses of :data:`CALLS` in the driver's library. Raise :class:`Unavailable` for a missing one."""
    found = ctypes.CDLL(LIBRARY) if library is None else library
    try:
        return tuple([int(ctypes.cast(getattr(found, name), ctypes.c_void_p).value or 0) for name in CALLS])
    except AttributeError as error:
        cure = f"update the driver, or choose the fallback: {VARIABLE}=0"
        raise Unavailable(f"the CUDA driver has too few functions: {error}", cure=cure, device="cuda") from error


def columns_of(module: Any) -> NativeColumns:  # noqa: ANN401 (an extension module)
    """Return the native part's functions for batches and token ids."""
    kinds = np.dtype(np.int32), np.dtype(np.int64), np.ndarray
    of_requests = partial(module.gather_requests, REQUEST_NAMES, SplitRole.MIXED, *kinds)
    return NativeColumns(module.gather_tasks, module.ids, of_requests, module.usual_rows)


class Native:
    """The native part over one driver. ``calls``: its ``Driver`` (native/calls.c); ``fail(status, call)`` raises,
    ``full(stream, event)`` waits for room in a stream's launch queue, or raises."""

    def __init__(
        self,
        module: Any,  # noqa: ANN401 (an extension module)
        fail: Callable[[int, str], None],
        full: Callable[[int, int], None],
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.module = module
        self.calls = module.Driver(fail, full, functions(library))
        self.columns = columns_of(module)


class NativeHostTable:
    """The native twin of a state's host table (:class:`hal_core.slots.host_table.Twin`). ``params``: the kernel
    parameters that describe the state to insertions."""

    def __init__(self, native: Native, state: SlotState, params: bytes) -> None:
        self.params = params
        table, sizes = state.host_table, state.sizes
        numbers = sizes.num_slots, sizes.max_model_len, sizes.max_blocks, sizes.block_size, sizes.max_draft_tokens
        self.raw = native.module.HostTable(table.table, table.requests, table.live, state.layout.config_key, *numbers)
        self._sound, self._commit = self.raw.sound, self.raw.commit

    def sound(self, tasks: TaskBatch) -> bool:
        """Return whether the batch is certainly valid."""
        found: bool = self._sound(tasks.ints, tasks.rows)
        return found

    def commit(self, tasks: TaskBatch) -> bool:
        """NativeHostTable the batch. Return False, without effect, if it has a leaving request."""
        booked: bool = self._commit(tasks.ints, tasks.rows, tasks.requests)
        return booked
