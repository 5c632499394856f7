"""A simulated accelerator: device memory the host cannot touch, streams that can be held, and a race checker."""

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
from hal_sim.group import Group, Reduce, new_group_name
from hal_sim.records import Operation, Report
from hal_sim.settings import Mode, get_option, options, set_option
from hal_sim.streams import Event, Stream

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
    "Spread",
    "Stream",
    "SubmissionRefused",
    "get_option",
    "label",
    "new_group_name",
    "options",
    "set_option",
]
