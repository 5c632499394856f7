"""Primitives by name and place, so that a message names what its author has to look at."""

from __future__ import annotations

import gc
import sys
import traceback
from pathlib import Path
from types import FrameType

import hal_core
from hal_core.devices.base import DeviceBase
from hal_core.devices.primitives import Primitives, poll

WAITS = {"event_synchronize", "event_query", "event_error"}
"""Primitives by which another one waits."""
NAMES = {name for face in (DeviceBase, Primitives) for name in vars(face) if not name.startswith("_")} | {
    name for name in dir(Primitives) if not name.startswith("_")
}
"""Methods that a vendor writes, or inherits."""
KIT = Path(__file__).parents[1]
CORE = Path(hal_core.__file__).parent
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


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread.

    No garbage is collected meanwhile: CPython holds a lock of its own in ``sys._current_frames``, and a finalizer may
    give up the interpreter's lock there. A thread that starts another one then waits for the former with the latter.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if enabled:
            gc.enable()


def position(frame: FrameType | None) -> tuple[object, ...]:
    """Return how far a stack is in code of the kit and the core: equal ones, later, mean that it has not moved.

    It ends where code of others begins, or a wait of the core: a loop that polls moves, and gets nowhere.
    """
    stack = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)][::-1]
    last = max((at for at, one in enumerate(stack) if _is_in(one, KIT) and not _is_in(one, KIT / "liars")), default=0)
    found = [(one.f_code, one.f_lasti) for one in stack[: last + 1]]
    for one in stack[last + 1 :]:
        if not _is_in(one, CORE) or one.f_code.co_name in (*WAITS, poll.__name__):
            break
        found.append((one.f_code, one.f_lasti))
    return tuple(found)


def _is_in(frame: FrameType, folder: Path) -> bool:
    return frame.f_code.co_filename.startswith(f"{folder}/")
