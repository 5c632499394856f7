"""Faces: packages that re-export names of their modules and load each module on first use.

``tools/faces.py`` writes ``__init__.pyi`` for type checkers from the same table. Listing devices therefore imports
neither NumPy nor a framework, and ``import hal_core`` is cheap.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def face(package: str, table: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package; ``table``: module to its names, separated by
    spaces."""
    home = {name: module for module, names in table.items() for name in names.split()}
    namespace = vars(sys.modules[package])

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(home[name]), name)
        return value

    return load, lambda: sorted({*namespace, *home}), [*home]
