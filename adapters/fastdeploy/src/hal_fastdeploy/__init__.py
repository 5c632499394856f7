"""hal's parts for FastDeploy: its System V queues, and its model runners' insertion of tasks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agreeing import Agreement as Agreement
    from .insertion import Insertion as Insertion
    from .saving import SaveOutput as SaveOutput
    from .values import SetValue as SetValue

_HOME = {"Agreement": "agreeing", "Insertion": "insertion", "SaveOutput": "saving", "SetValue": "values"}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
