"""Work in a forked process: its result, or how the process ended and in which part of the work."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Say = Callable[[str], None]
"""Called with a name for the part of the work that begins."""


@dataclass(frozen=True)
class Ending:
    """How the work ended. ``result``: its return value; None if it did not return, with the reason in ``why``.

    ``doing``: the last name that the work gave.
    """

    result: Any
    why: str = ""
    doing: str = ""


def apart(work: Callable[[Say], Any]) -> Ending:
    """Run ``work`` in a fork of this process, which must have opened no device. Its result must be JSON's.

    :raises KeyboardInterrupt: where the work was interrupted.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as pipe:
            lines = [json.loads(line) for line in pipe if line.endswith("\n")]
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    doing = next((line["doing"] for line in reversed(lines) if "doing" in line), "")
    ended = lines[-1] if lines else {}
    if ended.get("interrupted"):
        raise KeyboardInterrupt
    if "result" in ended:
        return Ending(ended["result"], doing=doing)
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return Ending(None, ended.get("error") or f"the process ended with {how}", doing)


def _work(work: Callable[[Say], Any], writing: int) -> None:
    """Run the work in the child, then end it: the parent's code, such as its exit handlers, must not run there."""
    with open(writing, "w", encoding="utf-8", buffering=1) as pipe:

        def say(**line: object) -> None:
            pipe.write(json.dumps(line) + "\n")

        try:
            result = work(lambda doing: say(doing=doing))
            say(result=result)
        except KeyboardInterrupt:
            say(interrupted=True)
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            say(error=f"{type(error).__name__}: {error}")
            traceback.print_exc()
        finally:
            pipe.flush()
            os._exit(0)
