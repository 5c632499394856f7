"""Work in a forked process: its result, or how the process ended, where its threads were, in which part of the work.

The work may end its process, wait for ever, or be ended by a signal that came here: this process goes on.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import math
import os
import pickle
import re
import select
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import IO, Any

from hal_core.errors import HalError, trace_of

from ..harness.processor import kept_waiting

Say = Callable[..., None]
"""Called with named values of JSON's: the next part of the work (``doing="…"``), or something for ``hear``."""
LOOK = 0.1
"""Seconds between two looks at the process."""
LAST = 4.0
"""Seconds in which the work ends in order after a signal; ``hal`` itself is ended by force after 8."""
FRAMES = 12
"""Lines of the stacks of a process that crashed or hung."""
CAME: list[int] = []
"""In the work's process: the signal that the parent has passed on."""
_CALLERS = re.compile(r"[/\\](_pytest|pluggy|hypothesis|hal_conformance)[/\\]")


@dataclass(frozen=True)
class Ending:
    """How the work ended. ``result``: its return value; None if it did not return, with the reason in ``why`` and, of a
    crash or a hang, Python's stacks in ``trace``.

    ``doing``: the last name that the work gave. ``late``: the work was ended for its silence.
    """

    result: Any
    why: str = ""
    doing: str = ""
    trace: str = ""
    late: bool = False


def apart(
    work: Callable[[Say], Any],
    hear: Callable[[dict[str, Any]], None] = lambda message: None,
    limit: Callable[[], float] = lambda: math.inf,
    came: Callable[[], object] = lambda: None,
) -> Ending:
    """Run ``work`` in a fork of this process, which must have opened no device. Its result must be JSON's.

    ``hear`` gets what the work says. After ``limit()`` seconds without a word, in which it had a processor, the process
    is ended. When ``came()`` is true, a signal has come to this process: the work gets a KeyboardInterrupt, and a
    moment to end.

    :raises KeyboardInterrupt: where the work was interrupted, and no signal came to this process.
    :raises HalError: the work's own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stacks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads of this process wait
            child = os.fork()
        if child == 0:
            os.close(reading)
            _work(work, writing, stacks)
        os.close(writing)
        known: dict[str, Any] = {}

        def keep(message: dict[str, Any]) -> None:
            known.update(message)
            hear(message)

        try:
            with open(reading, "rb", buffering=0) as pipe:
                late = _follow(child, pipe, keep, limit, came)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        stacks.seek(0)
        trace = _shown(stacks.read().decode(errors="replace"))
    doing = known.get("doing", "")
    if "result" in known:
        return Ending(known["result"], doing=doing)
    if known.get("interrupted") and not came():
        raise KeyboardInterrupt
    if "raised" in known:
        raise pickle.loads(base64.b64decode(known["raised"]))
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    how = f"no sign of progress for {late:g} s" if late else f"the process ended with {how}"
    return Ending(None, known.get("error") or how, doing, trace, late > 0)


def _follow(
    child: int,
    pipe: IO[bytes],
    hear: Callable[[dict[str, Any]], None],
    limit: Callable[[], float],
    came: Callable[[], object],
) -> float:
    """Hear the process until it ends, which a process that it has forked, and that holds the pipe, may outlive. Return
    the limit if it was ended for its silence, else 0."""
    os.set_blocking(pipe.fileno(), False)
    rest, ended, is_open, silent, signalled = b"", False, True, 0.0, 0.0
    before, kept = monotonic(), kept_waiting(child)
    while True:
        select.select([pipe] if is_open else [], [], [], 0.0 if ended else LOOK)
        data = pipe.read(1 << 16)
        is_open = data != b""  # a library may close every file of its process
        if data:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                hear(json.loads(line))
            silent = 0.0
        elif ended:
            return 0.0
        if (now := monotonic()) < before + LOOK and not ended:
            continue
        # Where this process stood still too (Ctrl-Z, a busy machine), no time has passed for the other one.
        waited = kept_waiting(child)
        silent += max(0.0, min(now - before, 1.0) - max(0.0, waited - kept))
        signalled += now - before if signalled else 0.0
        before, kept = now, waited
        ended = ended or _has_ended(child)
        if came() and not ended:
            os.kill(child, signal.SIGTERM)  # at each look: the child waits for one at which it can be interrupted
            signalled = signalled or LOOK
        if not ended and (silent > limit() or signalled > LAST):
            os.kill(child, signal.SIGUSR1)  # it prints its stacks
            select.select([], [], [], LOOK)
            os.kill(child, signal.SIGKILL)
            return limit() if silent > limit() else 0.0


def _has_ended(child: int) -> bool:
    """Whether a process is over; it stays to be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _shown(text: str) -> str:
    """Return faulthandler's stacks, those of the thread that got the signal last, as Python prints a traceback: the
    innermost frame at the end, and of each only the part that pytest and the kit have called."""
    stacks = []
    for block in re.split(r"\n(?=(?:Current thread|Thread) )", f"\n{text}"):
        frames = [line for line in block.splitlines() if line.startswith("  File") and '"<frozen ' not in line]
        own = [*itertools.takewhile(lambda line: not _CALLERS.search(line), frames)] or frames[:1]
        stacks.append(("Current thread" in block, own[FRAMES - 1 :: -1]))
    return "\n".join([line for _, stack in sorted(stacks, key=lambda one: one[0]) for line in stack][-FRAMES:])


def _work(work: Callable[[Say], Any], writing: int, stacks: IO[bytes]) -> None:
    """Run the work in the child, then end it: the parent's code, such as its exit handlers, must not run there."""
    gc.freeze()  # a collection would copy the pages of all that was imported
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: whatever ends the parent, nothing is left
    with open(writing, "w", encoding="utf-8", buffering=1) as pipe:

        def say(**message: object) -> None:
            pipe.write(json.dumps(message, default=str) + "\n")

        try:
            faulthandler.enable(stacks)
            faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
            _heed_signals()
            say(result=work(say))
        except KeyboardInterrupt:
            say(interrupted=True)
        except (HalError, OSError) as error:  # OSError: the command has a line for it
            say(raised=_carried(error))
        except BaseException as error:  # noqa: BLE001 (reported to the parent)
            say(error=f"{type(error).__name__}: {error}")
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream may be closed
                pipe.flush()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)


def _carried(error: HalError | OSError) -> str:
    """Return an error as text, with the traceback that pickling drops."""
    from ..ranks.processes import portable

    if isinstance(error, HalError):
        error.trace = trace_of(error)
    return base64.b64encode(pickle.dumps(portable(error))).decode()


def _heed_signals() -> None:
    """Leave a terminal's signals, which come to the parent too, to it: it sends one SIGTERM, which interrupts."""
    signal.set_wakeup_fd(-1)
    former = sys.unraisablehook  # in a callback, such as of the garbage collector, an interrupt is lost
    sys.unraisablehook = lambda lost: None if lost.exc_type is KeyboardInterrupt else former(lost)

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Where a frame has no line number pytest cannot show the traceback: the parent's next signal does it.
        if not CAME and (frame is None or frame.f_lineno is not None):
            CAME.append(number)
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    signal.signal(signal.SIGTERM, interrupt)


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], int | None]]:
    """Inside, SIGINT, SIGTERM and SIGHUP are noted, unless this process was started to ignore them. Yield what returns
    the first that came."""
    numbers: list[int] = []
    former = {}
    comes = threading.current_thread() is threading.main_thread()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if comes else ():
        if signal.getsignal(number) is not signal.SIG_IGN:
            former[number] = signal.signal(number, lambda number, frame: numbers.append(number))
    try:
        yield lambda: numbers[0] if numbers else None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
