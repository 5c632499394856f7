"""Calls of a tokenizer's native code with limits on processor time and memory.

Such a call holds the GIL until it returns, so no thread or signal handler of this process can end it. A forked child
makes the call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import pickle
import resource
import signal
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from hal_core import InvalidValue

from hal.timeouts import TIMEOUTS

ROOM, ROOM_OF_A_BYTE = 1 << 30, 1 << 10
"""Bytes of memory for a call, and further bytes for each byte of its text."""


def bounded(call: Callable[[str], list[int]], texts: Iterable[str], source: str) -> list[list[int]]:
    """Return ``call`` of each text. Raises :class:`InvalidValue` naming ``source`` for a text that exceeds a limit or
    fails in native code, and the call's own errors."""
    memory = os.memfd_create("hal-tokens")  # no pipe: its end comes when all forks of this process have closed theirs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads, which the child does not need
        child = os.fork()
    if child == 0:
        _serve(call, texts, memory)
    with open(memory, "rb") as file:
        ended = _end_of(child)
        file.seek(0)
        answer = file.read()
    status = int(not answer) if ended is None else ended
    if status:
        most = f"{TIMEOUTS.tokenizer:g} s of processor time"
        what = f"takes more than {most} for a prompt: a regular expression of it backtracks"
        if status != -signal.SIGXCPU:
            what = f"takes more than {ROOM >> 30} GiB of memory for a prompt: its normalizer makes texts longer"
        raise InvalidValue(what, cure="mend its patterns, or use another checkpoint", argument=source)
    found, error = pickle.loads(answer)
    if isinstance(error, str):
        raise InvalidValue(f"fails: {error}", cure="mend its patterns, or use another checkpoint", argument=source)
    if error is not None:
        raise error
    return list(found)


def _end_of(child: int) -> int | None:
    """Wait for the child; its status as ``subprocess`` has it, None if the process ignores SIGCHLD."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return None


def _serve(call: Callable[[str], list[int]], texts: Iterable[str], memory: int) -> NoReturn:
    """Run the child: write the answer and end in any case."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGABRT):  # Paddle's reports an abort
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # native code prints its own report of a failure
        os.environ["RUST_BACKTRACE"] = "0"  # a trace of a panic needs memory, and hangs without it
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        found: list[list[int]] = []
        error: Exception | str | None = None
        try:
            for text in texts:
                _limit(len(text.encode(errors="surrogatepass")))
                found.append(call(text))
        except MemoryError:
            os._exit(1)
        except Exception as raised:  # noqa: BLE001 (the parent raises it)
            error = raised
        except BaseException as raised:  # noqa: BLE001 (a panic of Rust's is no Exception)
            error = str(raised)
        with open(memory, "wb") as file:
            file.write(pickle.dumps((found, error)))
        os._exit(0)
    finally:
        os._exit(1)


def _limit(nbytes: int) -> None:
    """Set the limits for the next call, relative to the current usage."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + math.ceil(TIMEOUTS.tokenizer)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    room = pages * resource.getpagesize() + ROOM + ROOM_OF_A_BYTE * nbytes
    for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, room)):
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(ValueError):  # the user's lower limit remains
            resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
