"""Faces: packages that hand on names of the rooms behind them, each loaded on first use.

What type checkers read, ``__init__.pyi``, is made of the same table by ``tools/faces.py``.
So listing devices imports neither NumPy nor a framework, and ``import hal_core`` costs next to nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def face(package: str, rooms: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package; ``rooms``: module to its names, spaces between."""
    home = {name: module for module, names in rooms.items() for name in names.split()}
    namespace = vars(sys.modules[package])

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(home[name]), name)
        return value

    return load, lambda: sorted({*namespace, *home}), [*home]
