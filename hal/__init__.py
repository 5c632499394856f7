"""hal: one set of worker hooks for LLM inference on any accelerator.

Names are loaded on first use, so that ``import hal`` is fast and ``hal devices`` imports no framework.
"""

from __future__ import annotations

from importlib import import_module

from . import former

TYPE_CHECKING = False  # typing takes longer to import than this whole module, and a command handles no signal before
if TYPE_CHECKING:
    from hal_engine.generation import AsyncEngine as AsyncEngine
    from hal_engine.generation import Part as Part
    from hal_engine.generation import Ranks as Ranks
    from hal_engine.generation import generate as generate
    from hal_engine.reading import OutputReader as OutputReader
    from hal_paddle_runner import Worker as Worker

    from .device_list import Listed as Listed
    from .device_list import devices as devices
    from .opening import open_device as open_device

    __version__: str

_ENGINE = "hal_engine"
_HOME = {
    "AsyncEngine": f"{_ENGINE}.generation",
    "Part": f"{_ENGINE}.generation",
    "Ranks": f"{_ENGINE}.generation",
    "generate": f"{_ENGINE}.generation",
    "Listed": "hal.device_list",
    "devices": "hal.device_list",
    "open_device": "hal.opening",
    "OutputReader": f"{_ENGINE}.reading",
    "Worker": former.RUNNER,
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _version()
    elif name in _HOME:
        try:
            value = getattr(import_module(_HOME[name]), name)
        except ModuleNotFoundError as error:
            from importlib.util import find_spec

            if find_spec("hal_core") is None:
                cure = "use the environment that it was installed into (.venv/bin/python in a clone)"
                raise ImportError(f"hal is not installed in this Python: {cure}") from None
            if error.name not in (_ENGINE, former.RUNNER):
                raise
            raise engine_missing(f"hal.{name}") from None
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def engine_missing(what: str) -> Exception:
    """Return the error of a name or command of the engine, where the engine is not installed."""
    from hal_core import Unavailable

    return Unavailable(f"{what} is of hal's engine, which is not installed", cure="in a clone: pip install ./engine")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("paddle-hal")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


former.install()
