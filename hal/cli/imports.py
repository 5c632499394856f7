"""Large imports in a process that ends with its command."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from . import signals


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collections, and keep what was imported out of later ones, the interpreter's last too.

    It is no garbage: walking through Paddle's objects in each collection takes a quarter of a second of processor time
    in the import and half a second at the exit. Nothing is done where the process goes on after the command.
    """
    if not (signals.ends_process() and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
