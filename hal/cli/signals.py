"""Handling of SIGINT (Ctrl-C), SIGTERM and SIGHUP: the command ends with the exit status 128 + the signal's number.

A handler that raises anywhere would leave a library half imported, and in a callback the exception would be printed and
lost. Therefore the command declares how to react at each stage:

- nothing to clean up: the process ends at once (:func:`at_once`, and the default);
- something to clean up: the signal is noted; the command polls :func:`came` and ends in order (:func:`noted`);
- a call may block for ever: the signal is raised there (:func:`raised`).

A second signal ends the process at once and removes its private folders. Within ``TIMEOUTS.second_signal`` seconds it
counts as the first one, because a closing terminal and ``timeout`` send theirs twice. A command that is still running
``TIMEOUTS.signal`` seconds after the first signal is ended by force.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time

from . import deadline

TYPE_CHECKING = False  # as in hal
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType
    from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal came. (Not KeyboardInterrupt, for which libraries have handlers of their own.)"""


class _Watch:
    """State of the signals of this process."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.at = 0.0
        self.raises: type[BaseException] | None = None
        self.is_noted = False
        self.tidy: Callable[[], object] | None = None
        self.is_on = False
        self.is_last = False  #: whether the process ends with the command

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if self.first is None:
            if self.raises is not None and frame is not None and frame.f_lineno is None:
                signal.raise_signal(number)  # a little later: pytest fails at a traceback without a line number
                return
            self.first, self.at = int(number), now
            if self.raises is not None and not _collecting(frame):
                raise self.raises
            if self.is_noted or self.raises is not None:
                return
        elif (limits := deadline.durations()) is not None and now - self.at < limits.second_signal:
            return
        self.end()

    def end(self) -> None:
        """End the process now, and ignore further signals."""
        _ignore()
        try:
            if (console := sys.modules.get(f"{__package__}.console")) is not None:
                console.status("")
            if self.tidy is not None:
                self.tidy()
            _release_folders()
        finally:
            os._exit(128 + (self.first or signal.SIGINT))

    def force(self, number: int) -> None:
        """End the process now from a thread, because the main thread may hang, and the clean-up too. Its children end
        with it, or on their own."""
        try:
            if (limits := deadline.durations()) is not None:
                tidying = threading.Thread(target=self._tidy_up, args=(deadline.grace + limits.signal,), daemon=True)
                tidying.start()
                tidying.join(limits.tidying)
        finally:
            os._exit(128 + (self.first or number))

    def _tidy_up(self, seconds: float) -> None:
        from .console import say

        _release_folders()
        say(f"hal: ended by force: the signal could not be obeyed in order within {seconds:g} s")
        if self.tidy is not None:
            self.tidy()


def _release_folders() -> None:
    if (urls := sys.modules.get("hal_engine.transport.urls")) is not None:
        urls.release_all()


def _collecting(frame: FrameType | None) -> bool:
    """Return whether a callback of the garbage collector is running, such as Hypothesis installs: an exception there is
    printed and lost. The signal is noted then, and the kit's run ends before its next test."""
    codes = [getattr(one, "__code__", None) for one in gc.callbacks]
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


_watch = _Watch()


def came() -> int | None:
    """Return the number of the first signal, or None."""
    return _watch.first


def since() -> float:
    """Return the seconds since the first signal; 0 before one."""
    return 0.0 if _watch.first is None else time.monotonic() - _watch.at


def ends_process() -> bool:
    """Return whether the process ends with the command."""
    return _watch.is_last


def status() -> int:
    """Return the exit status of a command that a signal ended."""
    return 128 + (_watch.first or signal.SIGINT)


def check() -> None:
    """Raise :class:`Interrupted` if a signal has come, before any new work."""
    if _watch.first is not None:
        raise Interrupted


def end_now() -> None:
    """End the process at once, after a signal for which an orderly end failed."""
    _watch.end()


@contextlib.contextmanager
def watched(*, to_the_end: bool) -> Iterator[None]:
    """Install the handlers, except for signals that this process was started to ignore (``nohup``, a background job).

    ``to_the_end``: the process ends with the command, so the handlers stay until the interpreter exits.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    outer, _watch = _watch, _Watch()
    _watch.is_on, _watch.is_last = True, to_the_end
    former = _install()
    limit = deadline.Deadline(_NUMBERS, _watch.force)
    if to_the_end:  # registered first, so called last: after it the interpreter removes the handlers
        atexit.register(_leave)
    try:
        yield
    finally:
        if not to_the_end:
            limit.close()
            for number, handler in former.items():
                signal.signal(number, handler)
            _watch = outer


def _ignore() -> None:
    """Ignore all signals: only the exit is left, and its status is known."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _leave() -> None:
    """Prepare for the interpreter's own exit, in which no Python thread runs."""
    _ignore()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if (limits := deadline.durations()) is not None:
        signal.alarm(math.ceil(limits.interpreter_end))


def _install() -> dict[int, Any]:
    """Set the handlers and return those that were replaced."""
    former: dict[int, Any] = {}
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            former[number] = signal.signal(number, lambda number, frame: _watch.handle(number, frame))
    return former


@contextlib.contextmanager
def at_once(tidy: Callable[[], object] | None = None) -> Iterator[None]:
    """Inside, a signal calls ``tidy`` and ends the process at once. A signal noted before is raised here."""
    check()
    before = _watch.is_noted, _watch.tidy
    _watch.tidy, _watch.is_noted = tidy, False
    try:
        check()
        yield
    finally:
        _watch.is_noted, _watch.tidy = before


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Inside, a signal is only noted."""
    before = _watch.is_noted
    _watch.is_noted = True
    try:
        yield
    finally:
        _watch.is_noted = before


@contextlib.contextmanager
def raised(kind: type[BaseException] = Interrupted) -> Iterator[None]:
    """Inside, the first signal is raised as ``kind``. A signal noted before is raised here."""
    if _watch.first is not None:
        raise kind
    _watch.raises = kind
    try:
        yield
    finally:
        _watch.raises = None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep the handlers during an import that replaces them: Paddle's handler dumps a stack at SIGTERM.

    They are set again at each module lookup and at the end. Between Paddle's own setting and its next import a few
    milliseconds remain. Blocking the signal in that time would not help, because NumPy's threads would then receive it.
    """
    if not _watch.is_on:
        yield
        return
    sys.meta_path.insert(0, _Reinstalling())
    try:
        yield
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Reinstalling)]
        _install()


class _Reinstalling:
    """Module finder that finds no module; each lookup sets the handlers again."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if threading.current_thread() is threading.main_thread():
            _install()
