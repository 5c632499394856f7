"""Open one device in a subprocess, so that a crash, a hang or a framework's memory stays out of ``hal devices``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hal.timeouts import TIMEOUTS

from . import signals

#: The tail of a crashed child's stderr that goes into the report, in characters.
_TAIL = 400
#: What is in the folder: the child's answer, the same while it is written, and what it said on both streams.
_ANSWER, _PARTIAL, _NOISE = "answer.json", "answer.partial", "stderr"


def open_in_subprocess(name: str, timeout: float) -> dict[str, Any]:
    """Open ``name`` in a child; ``{"seconds", "capabilities", "fallbacks", "note"}`` or ``{"error"}``, no exception.

    The answer comes back in a file, because frameworks and drivers write to both standard streams.
    """
    with signals.noted(), _folder() as folder:
        signals.check()
        answer, noise = folder / _ANSWER, folder / _NOISE
        command = [sys.executable, "-P", "-m", __name__, name, str(answer)]
        with noise.open("wb") as stream:
            child = subprocess.Popen(  # its own session: what it has started ends with it
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                if not _has_ended(child, timeout):
                    return {"error": f"opening took longer than {timeout:g} s (raise --timeout, or see why it hangs)"}
            finally:
                _end(child)
        if answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return result
        code = child.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = " ".join(noise.read_text(encoding="utf-8", errors="replace")[-_TAIL:].split())
        return {"error": f"the process that opened it ended with {how}" + (f"; it said: {said}" if said else "")}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder for what is made in it here; taking it away needs no descriptor, as there may be none."""
    folder = Path(tempfile.mkdtemp(prefix="hal-open-"))
    try:
        yield folder
    finally:
        for name in (_ANSWER, _PARTIAL, _NOISE):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _has_ended(child: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for the end of ``child``. A signal, which does not reach it in its session, is raised here."""
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
        capabilities = device.capabilities
        return {
            "seconds": seconds,
            "capabilities": {
                ability.name: getattr(capabilities, ability.name)
                for ability in fields(capabilities)
                if ability.name != "fallbacks"
            },
            "fallbacks": dict(capabilities.fallbacks),
            "note": device.note,
        }


def _child(name: str, path: str) -> None:
    target = Path(path)
    partial = target.with_name(_PARTIAL)
    partial.write_text(json.dumps(_report(name)), encoding="utf-8")
    partial.replace(target)


if __name__ == "__main__":
    _child(*sys.argv[1:3])
