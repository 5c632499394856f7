"""Commands in separate processes, so that signals, limits and missing packages affect no other test."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

LIBRARIES = ("numpy.typing", "typer", "rich.live", "safetensors.numpy", "tokenizers", "msgspec")
LIBRARIES += ("pydantic.type_adapter", "packaging.requirements", "stevedore", "pytest", "hypothesis.stateful")
"""What ``hal run`` and ``hal conform`` import besides hal, and what takes most of their time; for the fixture ``warm``,
whose process is the same for all files that ask for the same."""
RUN = "from hal.cli import main; main()"

TWO_PROMPTS = ("--prompt", "def main(", "--prompt", "import os", "--temperature=0", "--max-tokens", "12")
TWO_PROMPTS += ("--json", "--logprobs", "1")
"""Options of a ``hal run`` with two greedy answers of twelve tokens."""


def heed_interrupts():
    """Start a process as a shell's background job: with interrupts ignored, which its children inherit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Environment in which all leftovers of a command are below ``folder``, by short names: a socket's path has 107
    bytes.
    """
    places = {}
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        place_of(folder, name).mkdir(exist_ok=True)
        places[name] = str(place_of(folder, name))
    buffered = {"PYTHONUNBUFFERED": ""}  # as everywhere except in containers: unflushed output is not visible
    return os.environ | {"HAL_DEVICE": "cpu"} | buffered | places | more


def place_of(folder: Path, name: str = "XDG_RUNTIME_DIR") -> Path:
    """Where the commands that are started in ``folder`` have the folder that the variable ``name`` gives them."""
    return folder / name[:3].lower()


def left_in(folder: Path) -> list[str]:
    """Paths of everything that the command may have left."""
    return [path.name for name in ("XDG_RUNTIME_DIR", "TMPDIR") for path in place_of(folder, name).iterdir()]


def start(folder: Path, *arguments: str, code: str = RUN, warm=None, **options) -> subprocess.Popen:
    """Start a command, or ``code``, with the usual dispositions of signals; ``warm``: in a fork of that process."""
    usual = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(folder)}
    if warm is not None:
        return warm.start(*arguments, code=code, **usual | options)
    usual["preexec_fn"] = heed_interrupts
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **usual | options)


def check_end(code, out, err, number):
    assert code == 128 + number, (code, err)
    assert "Traceback" not in out + err, err
    assert "Exception ignored" not in err, err


class Terminal(io.StringIO):
    """A stream that takes itself for a terminal."""

    def isatty(self):
        return True
