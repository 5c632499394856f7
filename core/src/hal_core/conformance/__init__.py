"""Former name of the conformance kit, which is now the distribution ``paddle-hal-conformance``.

For one release ``hal_core.conformance.NAME`` is ``hal_conformance.NAME``, resolved on first use. Without the kit it
raises ModuleNotFoundError with the command that installs the kit.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def kit(module: str = "") -> ModuleType:
    """Return a module of the kit. Raise ModuleNotFoundError, with the install command, if the kit is missing."""
    try:
        return import_module(f"hal_conformance{module}")
    except ModuleNotFoundError as missing:
        if missing.name != "hal_conformance":
            raise
        cure = "pip install ./conformance in hal's checkout"
        text = f"the conformance kit is not installed: it is the distribution paddle-hal-conformance ({cure})"
        raise ModuleNotFoundError(text, name="hal_conformance") from None


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # the import system asks for these, and must not load the kit
        raise AttributeError(name)
    return getattr(kit(), name)
