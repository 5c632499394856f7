"""The commands in processes of their own, which signals, limits and missing packages do not spoil for the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

RUN = "from hal.cli import main; main()"


def heed_interrupts():
    """A shell's background job starts with interrupts ignored, and hands that on to what it starts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Everything that a command may leave lies below ``folder``, by short names: a path of a socket has 107 bytes."""
    places = {}
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        place_of(folder, name).mkdir(exist_ok=True)
        places[name] = str(place_of(folder, name))
    return os.environ | {"HAL_DEVICE": "cpu"} | places | more


def place_of(folder: Path, name: str = "XDG_RUNTIME_DIR") -> Path:
    """Where the commands that are started in ``folder`` have the folder that the variable ``name`` gives them."""
    return folder / name[:3].lower()


def left_in(folder: Path) -> list[str]:
    """What lies where the command could leave something."""
    return [path.name for name in ("XDG_RUNTIME_DIR", "TMPDIR") for path in place_of(folder, name).iterdir()]


def start(folder: Path, *arguments: str, code: str = RUN, **options) -> subprocess.Popen:
    """Start a command, or ``code``, with the usual dispositions of signals."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(folder)}
    usual["preexec_fn"] = heed_interrupts
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **usual | options)
