"""Opens one device in a subprocess, so that a crash, a hang or a framework's memory stays out of ``hal devices``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal.timeouts import TIMEOUTS

from . import signals

if TYPE_CHECKING:
    from hal_core import BoundDevice

_TAIL = 400
"""Characters of a crashed child's output that the report quotes."""
_ANSWER, _PARTIAL, _NOISE = "answer.json", "answer.partial", "stderr"
"""Files of the folder: the child's answer, the unfinished answer, and the output of both streams."""


def open_in_subprocess(name: str, timeout: float) -> dict[str, Any]:
    """Open ``name`` in a child process. Return ``{"seconds", "capabilities", "fallbacks", "note"}`` or ``{"error"}``.

    The answer is returned in a file, because frameworks and drivers write to both standard streams.
    """
    ended = run_child(__name__, [name], timeout)
    if ended.timed_out:
        return {"error": f"opening took longer than {timeout:g} s (raise --timeout, or see why it hangs)"}
    if ended.answer is not None:
        return ended.answer
    output = f"; its output: {ended.output}" if ended.output else ""
    return {"error": f"the process that opened it {ended.how}{output}"}


@dataclass(frozen=True)
class Ended:
    """The end of a child process: its last answer, whether it was killed at its deadline or failed, how it ended, and
    its output's tail."""

    answer: dict[str, Any] | None
    timed_out: bool
    failed: bool
    how: str
    output: str


def run_child(module: str, arguments: Sequence[str], timeout: float) -> Ended:
    """Run ``python -m module *arguments FILE`` in a child process, which calls :func:`answer` with FILE."""
    with signals.noted(), _folder() as folder:
        signals.check()
        path, noise = folder / _ANSWER, folder / _NOISE
        command = [sys.executable, "-P", "-m", module, *arguments, str(path)]
        with noise.open("wb") as stream:
            child = subprocess.Popen(  # in a session of its own, so that its children end with it
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                in_time = _has_ended(child, timeout)
            finally:
                _end(child)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        code = child.returncode
        how = f"ended with signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        output = " ".join(noise.read_text(encoding="utf-8", errors="replace")[-_TAIL:].split())
        return Ended(found, not in_time, code != 0, how, output)


def answer(path: str, found: dict[str, Any]) -> None:
    """Write a child's answer in place of the one before; the parent reads a whole one, whenever the child ends."""
    target = Path(path)
    partial = target.with_name(_PARTIAL)
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(target)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yield a temporary folder and remove its files. Removal opens no descriptor, because none may be left."""
    folder = Path(tempfile.mkdtemp(prefix="hal-open-"))
    try:
        yield folder
    finally:
        for name in (_ANSWER, _PARTIAL, _NOISE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _has_ended(child: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for the end of ``child``. Raise if a signal came; the signal does not reach the child's session."""
    end = time.monotonic() + timeout
    while True:
        signals.check()
        left = end - time.monotonic()
        try:
            child.wait(max(0.0, min(left, TIMEOUTS.look)))
        except subprocess.TimeoutExpired:
            if left <= 0:
                return False
        else:
            return True


def _end(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _report(name: str) -> dict[str, Any]:
    from hal_core import HalError, trace_of

    from hal import open_device

    begin = time.perf_counter()
    try:
        device = open_device(name)
    except HalError as error:
        return {"error": " ".join(str(error).split()), "trace": trace_of(error)}
    seconds = time.perf_counter() - begin
    with contextlib.closing(device):
        return {"seconds": seconds, **described(device)}


def described(device: BoundDevice) -> dict[str, Any]:
    """Return the capabilities, the fallbacks and the note of an opened device."""
    capabilities = device.capabilities
    return {
        "capabilities": {
            ability.name: getattr(capabilities, ability.name)
            for ability in fields(capabilities)
            if ability.name != "fallbacks"
        },
        "fallbacks": dict(capabilities.fallbacks),
        "note": device.note,
    }


if __name__ == "__main__":
    answer(sys.argv[2], _report(sys.argv[1]))
