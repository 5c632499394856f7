"""The simulator's options, which hold for the whole process."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from enum import IntEnum

from hal_sim._native import native


class Mode(IntEnum):
    """When a stream runs its queued work."""

    EAGER = 0
    WORKER = 1
    LAZY = 2


def set_option(name: str, value: int) -> int:
    """Set an option (``native/options.h`` lists them) for the whole process; returns the former value."""
    former = ctypes.c_long()
    native().check(native().set_option(name.encode(), int(value), ctypes.byref(former)))
    return former.value


def get_option(name: str) -> int:
    value = ctypes.c_long()
    native().check(native().get_option(name.encode(), ctypes.byref(value)))
    return value.value


@contextlib.contextmanager
def options(**values: int) -> Iterator[None]:
    """Set options for the duration of a ``with`` block."""
    former: dict[str, int] = {}
    try:
        for name, value in values.items():
            former[name] = set_option(name, value)
        yield
    finally:
        for name, value in former.items():
            set_option(name, value)
