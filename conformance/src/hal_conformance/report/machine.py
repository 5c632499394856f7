"""The kit that ran, and the machine it ran on, for the head of a report."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

KIT = Path(__file__).parents[1]


@functools.cache
def machine() -> dict[str, Any]:
    """Return the kit with its revision, the operating system, the processor, and the versions of libraries."""
    names = ("paddle-hal-core", "numpy", "pluggy", "hypothesis", "pytest")
    return {
        "kit": f"{_version('paddle-hal-conformance')}, {revision()}",
        "system": f"{_distribution()}, {platform.system()} {platform.release()}",
        "processor": f"{_processor()}, {os.cpu_count()} of {platform.machine()}",
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in names},
    }


def revision() -> str:
    """Return the commit of a kit that runs from its checkout, else a digest of its files."""
    try:
        for command in (
            ["ls-files", "--error-unmatch", "plugin.py"],
            ["describe", "--always", "--dirty", "--abbrev=12"],
        ):
            done = subprocess.run(["git", "-C", str(KIT), *command], capture_output=True, text=True, check=True)
        return f"commit {done.stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        digest = hashlib.sha256()
        for path in sorted(KIT.rglob("*.py")):
            digest.update(path.read_bytes())
        return f"files {digest.hexdigest()[:12]}"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(found, "") or platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
