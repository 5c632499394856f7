"""Facts of a measurement on a GPU: its command, date, machine and versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hal_core.devices import probing


def facts(module: str) -> dict[str, Any]:
    """Return the command, the date, the machine and the versions."""
    versions = {}
    for name in ("numpy", "torch", "triton", "cuda-core", "cuda-bindings", "paddle-hal-core"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "from the source tree" if name == "paddle-hal-core" else "none"
    paddle = probing.installed_paddle()
    versions["paddle"] = "none" if paddle is None else f"{paddle.version} for {paddle.build}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    return {
        "command": f"python -m {module} {' '.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "versions": versions,
        "gpus": gpus,
    }
