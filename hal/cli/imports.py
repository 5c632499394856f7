"""Large imports in a process that ends with its command."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from . import signals


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collection, and exclude the imported objects from later collections, the last one
    included.

    None of these objects is garbage. Traversing Paddle's objects costs a quarter of a second of processor time during
    the import and half a second at exit. Without effect if the process continues after the command.
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
