"""The device-agnostic contract of hal: hooks, value objects, slot state, write plans, frames, and the cpu device.

Names are loaded on first use, so that listing devices imports neither NumPy nor a framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capabilities import Capabilities as Capabilities
    from .counters import Counters as Counters
    from .device import Device as Device
    from .device import Plugin as Plugin
    from .device import Probe as Probe
    from .dtypes import DType as DType
    from .errors import HalError as HalError
    from .fields import Sizes as Sizes
    from .group import ALONE as ALONE
    from .group import Group as Group
    from .markers import hookimpl as hookimpl
    from .requests import AdmittedRequest as AdmittedRequest
    from .requests import Request as Request
    from .requests import SamplingParams as SamplingParams
    from .requests import admit as admit
    from .state import SlotState as SlotState
    from .steps import Step as Step
    from .tasks import Task as Task
    from .tasks import TaskBatch as TaskBatch
    from .tasks import TaskKind as TaskKind
    from .tickets import Ticket as Ticket
    from .views import View as View

_HOME = {
    "Capabilities": "capabilities",
    "Counters": "counters",
    "Device": "device",
    "Plugin": "device",
    "Probe": "device",
    "DType": "dtypes",
    "HalError": "errors",
    "Sizes": "fields",
    "ALONE": "group",
    "Group": "group",
    "hookimpl": "markers",
    "AdmittedRequest": "requests",
    "Request": "requests",
    "SamplingParams": "requests",
    "admit": "requests",
    "SlotState": "state",
    "Step": "steps",
    "Task": "tasks",
    "TaskBatch": "tasks",
    "TaskKind": "tasks",
    "Ticket": "tickets",
    "View": "views",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
