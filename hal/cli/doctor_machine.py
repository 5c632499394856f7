"""What ``hal doctor`` reports of the machine: limits, compilers and Paddle's build."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from typing import Any

LEAST_DESCRIPTORS = 256
"""Fewer are a finding: a quarter of the usual limit of 1024."""
LEAST_SHARED = 16 << 20
"""Fewer free bytes are a finding: a quarter of a container's usual 64 MiB."""
COMPILERS = ("c++", "g++", "clang++", "nvcc")
SHARED = "/dev/shm"


def facts() -> dict[str, Any]:
    """Return the machine's facts by name."""
    from hal_core.devices import installed_paddle

    from .versions import lines

    versions = dict(line.split(" ", 1) for line in lines())
    paddle = installed_paddle()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        **versions,
        "paddle_built_for": paddle.build if paddle else "",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "shared_memory_free": _shared(),
        "descriptors": soft,
        "descriptors_possible": hard,
        "lockable_memory": -1 if locked == resource.RLIM_INFINITY else locked,
        "compilers": [name for name in COMPILERS if shutil.which(name)],
        "variables": {name: value for name, value in os.environ.items() if value and _is_reported(name)},
    }


VARIABLES = ("HAL_DEVICE", "HAL_PLUGINS", "HAL_OBSERVERS", "OMP_NUM_THREADS")
"""Variables that change the choice of a device, besides those that hide devices. No other variable is reported."""
HIDING = "_VISIBLE_DEVICES"


def _is_reported(name: str) -> bool:
    return name in VARIABLES or name.endswith(HIDING)


def _shared() -> int | None:
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def findings(found: dict[str, Any]) -> list[str]:
    """Return each limit that is too low, with its cure."""
    lines = []
    shared, soft = found["shared_memory_free"], found["descriptors"]
    if shared is not None and shared < LEAST_SHARED:
        what = f"shared memory has {shared >> 20} MiB free, less than {LEAST_SHARED >> 20}"
        lines.append(f"{what} (free some of {SHARED}, or start the container with a larger one: --shm-size)")
    if 0 <= soft < LEAST_DESCRIPTORS:
        lines.append(f"{soft} descriptors a process are few (raise the limit: ulimit -n {LEAST_DESCRIPTORS} or more)")
    return lines
