"""Primitives by name and place, so that a message names what its author has to look at."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import FrameType

from hal_core.devices.base import DeviceBase
from hal_core.devices.primitives import Primitives

WAITS = {"event_synchronize", "event_query", "event_error"}
"""Primitives by which another one waits."""
NAMES = {name for face in (DeviceBase, Primitives) for name in vars(face) if not name.startswith("_")} | {
    name for name in dir(Primitives) if not name.startswith("_")
}
"""Methods that a vendor writes, or inherits."""
KIT = Path(__file__).parents[1]
INNERMOST = 5
"""Functions named behind the primitive, so that its author finds the place."""


def method(device: object, name: str) -> str:
    """Return a method of a device with the place of its code, as "copy_within (device.py:20)"."""
    found = getattr(type(device), name, None)
    code = getattr(found, "__code__", None)
    return name if code is None else f"{name} ({place(code.co_filename, code.co_firstlineno)})"


def place(path: str, line: int) -> str:
    """Return a file and a line; code of the core is called the default."""
    core = "hal_core" in Path(path).parts
    return f"{Path(path).name}:{line}" + (", the default of hal_core" if core else "")


def primitive_of(frame: FrameType | None) -> str:
    """Return the innermost primitive in a stack, as :func:`method` does; "" if there is none."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in NAMES - WAITS and KIT not in Path(code.co_filename).parents:
            return f"{code.co_name} ({place(code.co_filename, frame.f_lineno)})"
        frame = frame.f_back
    return ""


def innermost(frame: FrameType | None) -> str:
    """Return the innermost functions of a stack, for the end of a message."""
    stack = [] if frame is None else traceback.extract_stack(frame)[: -INNERMOST - 1 : -1]
    places = [f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in stack]
    return f", in {', called by '.join(places)}" if places else ""
