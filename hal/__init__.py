"""hal: one set of worker hooks for LLM inference on any accelerator.

Names are loaded on first use, so that ``import hal`` is fast and ``hal devices`` imports no framework.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing takes longer to import than this whole module, and a command handles no signal before
if TYPE_CHECKING:
    from .device_list import Listed as Listed
    from .device_list import devices as devices
    from .generation import AsyncEngine as AsyncEngine
    from .generation import Part as Part
    from .generation import Ranks as Ranks
    from .generation import generate as generate
    from .opening import open_device as open_device
    from .reading import OutputReader as OutputReader
    from .worker import Worker as Worker

    __version__: str

_HOME = {
    "AsyncEngine": "generation",
    "Part": "generation",
    "Ranks": "generation",
    "generate": "generation",
    "Listed": "device_list",
    "devices": "device_list",
    "open_device": "opening",
    "OutputReader": "reading",
    "Worker": "worker",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("paddle-hal")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
