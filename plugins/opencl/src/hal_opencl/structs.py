"""The structures that kernels take as their last argument; their twins are in kernels.cl."""

from __future__ import annotations

import ctypes as c
from typing import ClassVar

from hal_core.devices import STEP_FIELDS

AXES = 8
"""Axes of a view that one launch of ``strided`` takes."""


class Plan(c.Structure):
    """A packed write plan, for the kernel ``scatter``."""

    _fields_: ClassVar = [
        (name, c.c_uint64)
        for name in (
            *("memory", "nbytes", "block", "map", "records", "fields", "slots"),
            *("writes", "record_bytes", "slots_at", "records_at", "payload_at"),
        )
    ]


class Strided(c.Structure):
    """A strided view and bytes that lie together, for the kernel ``strided``."""

    _fields_: ClassVar = [
        *((name, c.c_uint64) for name in ("view", "packed", "run", "inward", "axes")),
        ("shape", c.c_uint64 * AXES),
        ("strides", c.c_int64 * AXES),
    ]


class Update(c.Structure):
    """Where the fields of a state lie, in the order of STEP_FIELDS, and its sizes, for the kernel ``update``."""

    _fields_: ClassVar = [
        ("at", c.c_uint64 * len(STEP_FIELDS)),
        ("stride", c.c_uint64 * len(STEP_FIELDS)),
        *((name, c.c_int64) for name in ("max_accept", "max_stop_length", "max_model_len", "speculative")),
    ]
