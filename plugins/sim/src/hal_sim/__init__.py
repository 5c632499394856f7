"""A simulated accelerator: device memory the host cannot touch, streams that can be held, and a race checker.

Only the plugin class is imported with the package. The rest is imported on first use, as it needs NumPy and the library
that is built then.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hal_sim.plugin import SimPlugin

if TYPE_CHECKING:
    from hal_sim._native import DeviceFault, KernelFunction, SubmissionRefused
    from hal_sim.accelerator import (
        FIELD,
        FREED_POISON,
        FRESH_POISON,
        PENDING_POISON,
        WRITE,
        Accelerator,
        PinnedMemory,
        Spread,
        label,
    )
    from hal_sim.build import BuildFailed, NoCompiler, NoPaddle
    from hal_sim.device import SimDevice
    from hal_sim.group import Group, Reduce, new_group_name
    from hal_sim.records import Operation, Report
    from hal_sim.settings import Mode, get_option, options, set_option
    from hal_sim.streams import Event, Stream
    from hal_sim.targets import SimTensor

_HOMES = {
    "_native": ("DeviceFault", "KernelFunction", "SubmissionRefused"),
    "accelerator": (
        *("FIELD", "FREED_POISON", "FRESH_POISON", "PENDING_POISON", "WRITE"),
        *("Accelerator", "PinnedMemory", "Spread", "label"),
    ),
    "build": ("BuildFailed", "NoCompiler", "NoPaddle"),
    "device": ("SimDevice",),
    "group": ("Group", "Reduce", "new_group_name"),
    "records": ("Operation", "Report"),
    "settings": ("Mode", "get_option", "options", "set_option"),
    "streams": ("Event", "Stream"),
    "targets": ("SimTensor",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "FIELD",
    "FREED_POISON",
    "FRESH_POISON",
    "PENDING_POISON",
    "WRITE",
    "Accelerator",
    "BuildFailed",
    "DeviceFault",
    "Event",
    "Group",
    "KernelFunction",
    "Mode",
    "NoCompiler",
    "NoPaddle",
    "Operation",
    "PinnedMemory",
    "Reduce",
    "Report",
    "SimDevice",
    "SimPlugin",
    "SimTensor",
    "Spread",
    "Stream",
    "SubmissionRefused",
    "get_option",
    "label",
    "new_group_name",
    "options",
    "set_option",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'hal_sim' has no attribute '{name}'")
    return getattr(import_module(f"hal_sim.{home}"), name)
