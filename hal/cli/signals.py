"""What SIGINT (Ctrl-C), SIGTERM and SIGHUP do to a command: it ends with the exit status 128 + the signal's number.

None of them raises an exception wherever the program happens to be: in an import it would leave a library half loaded,
and in a callback it would be printed and forgotten. What happens is what the command says of the place it is at:

- nothing has to be tidied up: the process ends at once (:func:`at_once`, and where nothing else is said);
- something has: the signal is noted, and the command looks for it with :func:`came` and ends in order (:func:`noted`);
- a call may wait for ever: the signal is raised there (:func:`raised`).

A second signal, more than ``TIMEOUTS.second_signal`` seconds after the first, ends the process at once, with its
private folders removed. Sooner it counts as the same one: a closing terminal and ``timeout`` send theirs twice. A
command that has not ended ``TIMEOUTS.signal`` seconds after the first one is ended by force, whatever its main thread
waits for.
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

from hal.timeouts import TIMEOUTS

from . import deadline

TYPE_CHECKING = False  # as in hal
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType
    from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_NUMBERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Interrupted(BaseException):
    """A signal came. (No KeyboardInterrupt: libraries between here and the command have their own words for that.)"""


class _Watch:
    """The signals of this process, to which their dispositions belong."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.at = 0.0
        self.raises: type[BaseException] | None = None
        self.is_noted = False
        self.tidy: Callable[[], object] | None = None
        self.is_on = False
        self.is_last = False  #: the process ends with the command

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if self.first is None:
            if self.raises is not None and frame is not None and frame.f_lineno is None:
                signal.raise_signal(number)  # a little later: pytest fails at a traceback without a line
                return
            self.first, self.at = int(number), now
            if self.raises is not None and not _collecting(frame):
                raise self.raises
            if self.is_noted or self.raises is not None:
                return
        elif now - self.at < TIMEOUTS.second_signal:
            return
        self.end()

    def end(self) -> None:
        """End the process now. Signals that come meanwhile change nothing."""
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
        """End the process now, from another thread than the main one, which may never go on: nor may what is tidied up.
        Its children end with it, or by themselves."""
        try:
            tidying = threading.Thread(target=self._tidy_up, daemon=True)
            tidying.start()
            tidying.join(TIMEOUTS.tidying)
        finally:
            os._exit(128 + (self.first or number))

    def _tidy_up(self) -> None:
        from .console import say

        _release_folders()
        say(f"hal: ended by force: the signal could not be obeyed in order within {TIMEOUTS.signal:g} s")
        if self.tidy is not None:
            self.tidy()


def _release_folders() -> None:
    if (urls := sys.modules.get("hal.transport.urls")) is not None:
        urls.release_all()


def _collecting(frame: FrameType | None) -> bool:
    """True in a callback of the garbage collector, such as Hypothesis has: what it raises is printed and forgotten. The
    signal is noted then, and the run of the kit ends before its next test."""
    codes = [getattr(one, "__code__", None) for one in gc.callbacks]
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


_watch = _Watch()


def came() -> int | None:
    """The number of the first signal that came, if one has."""
    return _watch.first


def since() -> float:
    """Seconds since the first signal, 0 while none has come."""
    return 0.0 if _watch.first is None else time.monotonic() - _watch.at


def ends_process() -> bool:
    """Whether the process ends with the command that is running."""
    return _watch.is_last


def status() -> int:
    """The exit status of a command that a signal has ended."""
    return 128 + (_watch.first or signal.SIGINT)


def check() -> None:
    """Raise :class:`Interrupted` if a signal has come: nothing more is to be begun."""
    if _watch.first is not None:
        raise Interrupted


def end_now() -> None:
    """End the process at once, after a signal that could not be obeyed in order."""
    _watch.end()


@contextlib.contextmanager
def watched(*, to_the_end: bool) -> Iterator[None]:
    """Take over the signals, but for those that this process was started to ignore (``nohup``, a background job).

    ``to_the_end``: the process ends with the command, so they stay taken over until the interpreter has gone.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    outer, _watch = _watch, _Watch()
    _watch.is_on, _watch.is_last = True, to_the_end
    former = _install()
    limit = deadline.Deadline(_NUMBERS, _watch.force)
    if to_the_end:  # registered first, so called last: behind it the interpreter takes our handlers away
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
    """Nothing is left that a signal could end, and the status is known."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _leave() -> None:
    """Only the interpreter's own end is left, in which no thread of ours runs."""
    _ignore()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(TIMEOUTS.interpreter_end))


def _install() -> dict[int, Any]:
    """Set the handlers and return those that were replaced."""
    former: dict[int, Any] = {}
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            former[number] = signal.signal(number, lambda number, frame: _watch.handle(number, frame))
    return former


@contextlib.contextmanager
def at_once(tidy: Callable[[], object] | None = None) -> Iterator[None]:
    """Inside, the process ends at once, after a call of ``tidy``. One that was noted before is raised here."""
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
    """Inside, a signal is noted, and nothing else."""
    before = _watch.is_noted
    _watch.is_noted = True
    try:
        yield
    finally:
        _watch.is_noted = before


@contextlib.contextmanager
def raised(kind: type[BaseException] = Interrupted) -> Iterator[None]:
    """Inside, the first signal is raised as ``kind``. One that was noted before is raised here."""
    if _watch.first is not None:
        raise kind
    _watch.raises = kind
    try:
        yield
    finally:
        _watch.raises = None


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep the handlers through an import that sets others: Paddle's dumps a stack at SIGTERM. In the end ours are set.

    They are set again with each module that is looked for. What is left are the milliseconds from Paddle's setting its
    own to its next import; blocking the signal meanwhile would not do, as NumPy's threads then take it.
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
    """A finder of modules that finds none, but is asked first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if threading.current_thread() is threading.main_thread():
            _install()
