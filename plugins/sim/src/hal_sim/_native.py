"""The C functions of ``native/api.cc``, with their types, and the meaning of their return codes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_long, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from hal_core import DeviceClosed, GroupLost, HalError, InvalidValue, OutOfMemory, TicketTimeout

from hal_sim.build import BuildFailed, core_library

ABI = 1
MAX_RANK = 9


class DeviceFault(HalError, RuntimeError):
    """Accepted work failed on the device; reported by the next wait."""


class SubmissionRefused(HalError, RuntimeError):
    """Fault injection refused a copy or a launch; no work was queued."""


class Record(ctypes.Structure):
    _fields_ = (
        ("sequence", c_uint64),
        ("dst", c_uint64),
        ("src", c_uint64),
        ("bytes", c_uint64),
        ("ran", c_uint64),
        ("kind", c_uint32),
        ("device", c_int32),
        ("stream", c_int32),
        ("label", ctypes.c_char * 36),
    )


class Report(ctypes.Structure):
    _fields_ = (
        ("kind", c_uint32),
        ("has_second", c_uint32),
        ("begin", c_uint64),
        ("bytes", c_uint64),
        ("first", Record),
        ("second", Record),
        ("text", ctypes.c_char * 256),
    )


class Spread(ctypes.Structure):
    _fields_ = (
        ("records", c_uint64),
        ("record_bytes", c_uint64),
        ("count", c_uint64),
        ("slots", c_uint64),
        ("slot_bytes", c_uint32),
        ("field_count", c_uint32),
        ("fields", c_uint64),
        ("slot_limit", c_uint64),
        ("base", c_uint64),
    )


class Scatter(ctypes.Structure):
    _fields_ = (
        ("block", c_uint64),
        ("block_bytes", c_uint64),
        ("table", c_uint64),
        ("count", c_uint64),
        ("base", c_uint64),
        ("payload", c_uint64),
    )


class Strided(ctypes.Structure):
    _fields_ = (
        ("dst", c_uint64),
        ("src", c_uint64),
        ("rank", c_uint32),
        ("item_bytes", c_uint32),
        ("dims", c_int64 * MAX_RANK),
        ("dst_strides", c_int64 * MAX_RANK),
        ("src_strides", c_int64 * MAX_RANK),
    )


KernelFunction = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)

# name: result type, argument types. A result of c_int is a status.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi": (c_int, ()),
    "last_error": (c_char_p, ()),
    "set_option": (c_int, (c_char_p, c_long, POINTER(c_long))),
    "get_option": (c_int, (c_char_p, POINTER(c_long))),
    "option_name": (c_char_p, (c_int,)),
    "kind_name": (c_char_p, (c_int,)),
    "kind_flags": (c_char_p, (c_int,)),
    "counters": (None, (POINTER(c_long),)),
    "set_label": (c_char_p, (c_char_p,)),
    "trace": (c_size_t, (POINTER(Record), c_size_t, c_uint64)),
    "reports": (c_size_t, (POINTER(Report), c_size_t)),
    "dropped_records": (c_size_t, ()),
    "dropped_reports": (c_size_t, ()),
    "noted_segments": (c_size_t, ()),
    "pending_tasks": (c_long, ()),
    "reset": (c_int, ()),
    "allocate": (c_int, (c_int, c_size_t, POINTER(c_void_p))),
    "free": (c_int, (c_int, c_void_p)),
    "pin": (c_int, (c_size_t, POINTER(c_void_p))),
    "unpin": (c_int, (c_void_p,)),
    "memory_used": (c_size_t, (c_int,)),
    "is_device_memory": (c_int, (c_void_p,)),
    "is_pinned": (c_int, (c_void_p, c_size_t)),
    "peek": (c_int, (c_void_p, c_void_p, c_size_t)),
    "poke": (c_int, (c_void_p, c_void_p, c_size_t)),
    "host_access": (c_int, (c_void_p, c_size_t, c_int)),
    "host_publish": (None, (c_uint64,)),
    "host_acquire": (None, (c_uint64,)),
    "stream_create": (c_int, (c_int, POINTER(c_void_p))),
    "stream_destroy": (c_int, (c_void_p,)),
    "stream_hold": (c_int, (c_void_p, c_int)),
    "stream_query": (c_int, (c_void_p, POINTER(c_int))),
    "stream_wait": (c_int, (c_void_p, c_long)),
    "device_wait": (c_int, (c_int, c_long)),
    "stream_pending": (c_int, (c_void_p, POINTER(c_long))),
    "stream_info": (c_int, (c_void_p, POINTER(c_int), POINTER(c_int))),
    "event_create": (c_int, (POINTER(c_void_p),)),
    "event_destroy": (c_int, (c_void_p,)),
    "event_record": (c_int, (c_void_p, c_void_p)),
    "event_timed": (c_int, (c_void_p,)),
    "event_seconds": (c_int, (c_void_p, c_void_p, POINTER(c_double))),
    "event_query": (c_int, (c_void_p, POINTER(c_int))),
    "event_wait": (c_int, (c_void_p, c_long)),
    "stream_wait_event": (c_int, (c_void_p, c_void_p)),
    "copy_async": (c_int, (c_int, c_void_p, c_int, c_int, c_void_p, c_void_p, c_size_t)),
    "copy_now": (c_int, (c_int, c_int, c_int, c_void_p, c_void_p, c_size_t)),
    "launch_scatter": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64, c_uint64, c_uint64, c_uint64)),
    "launch_plan": (c_int, (c_void_p, POINTER(Spread), POINTER(Scatter))),
    "launch_spread": (c_int, (c_void_p, POINTER(Spread))),
    "launch_strided": (c_int, (c_void_p, POINTER(Strided))),
    "launch_fill": (c_int, (c_void_p, c_uint64, c_uint64, c_uint64, c_uint32)),
    "launch_function": (c_int, (c_void_p, c_char_p, c_char_p, c_size_t)),
    "launch_pointer": (c_int, (c_void_p, KernelFunction, c_char_p, c_size_t)),
    "group_name": (None, (ctypes.c_char_p, c_size_t)),
    "group_join": (c_int, (c_char_p, c_uint32, c_uint32, POINTER(c_void_p))),
    "group_leave": (c_int, (c_void_p,)),
    "group_check": (c_int, (c_void_p,)),
    "collective": (
        c_int,
        (c_void_p, c_void_p, c_char_p, c_void_p, c_void_p, c_size_t, c_uint32, c_uint32, c_uint32),
    ),
    "transfer": (c_int, (c_void_p, c_void_p, c_void_p, c_size_t, c_uint32, c_int)),
}

_ERRORS: dict[int, tuple[type[HalError], str]] = {
    1: (InvalidValue, ""),
    2: (OutOfMemory, "free memory, or raise the option memory_mb"),
    3: (TicketTimeout, "wait again, or release the stream that is held"),
    4: (DeviceClosed, "start worker processes with spawn, or open the device after the fork"),
    5: (DeviceFault, "read races() for the operation and its memory"),
    6: (SubmissionRefused, "this is fault injection: submit again"),
    7: (GroupLost, "make a new group of the remaining ranks"),
}


class Native:
    """The loaded library: one attribute for each function, without the prefix."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, f"halsim_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - ctypes functions have no better type
        raise AttributeError(f"the simulator has no function '{name}'")

    def check(self, status: int) -> None:
        """Raise the error of a status other than 0."""
        if status:
            error, cure = _ERRORS[status]
            raise error(self.last_error().decode(errors="replace"), cure=cure)


@cache
def native() -> Native:
    """Return the simulator, built and loaded once per process."""
    library = Native(str(core_library()))
    if library.abi() != ABI:
        raise BuildFailed(
            f"the simulator library has interface {library.abi()}, but this package needs {ABI}",
            cure="remove the cache folder and try again",
            device="sim",
        )
    return library
