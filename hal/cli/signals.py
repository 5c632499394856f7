"""SIGINT (Ctrl-C), SIGTERM and SIGHUP: a command ends in time, with the exit status 128 + the signal's number.

A handler that raised anywhere would leave a library half imported, and in a callback the exception would be lost.
Therefore a command declares how the first signal acts at each stage:

- without resources to release: the process ends at once (:func:`at_once`, and the default);
- with resources to release: the signal is noted; the command polls :func:`came` and ends in order (:func:`noted`);
- in a call that may block for ever: the signal is raised there (:func:`raised`).

A later signal ends the process at once, unless it comes within ``TIMEOUTS.second_signal`` seconds: a closing terminal
and ``timeout`` send theirs twice. ``TIMEOUTS.signal`` seconds after the first one, a thread ends the process by force.
(The interpreter calls handlers in the main thread alone, which may hang, but writes each number to a pipe at once.)
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

    from hal.timeouts import Timeouts

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTE, _END = "note", "end"  # the action of the first signal; otherwise the exception that it raises

grace = 0.0
"""Seconds that work may still take after a signal, before those of the forced end begin: ``hal serve --drain``."""


class Interrupted(BaseException):
    """A signal came. (Not KeyboardInterrupt, for which libraries have handlers of their own.)"""


class _Watch:
    """The first signal to this process, and the action of the next one."""

    def __init__(self, *, is_last: bool) -> None:
        self.first: int | None = None
        self.at = 0.0
        self.action: str | type[BaseException] = _END
        self.tidy: Callable[[], object] | None = None
        self.is_last = is_last  #: whether the process ends with the command
        self.reading, self.writing = -1, -1  #: the pipe, while the handlers are installed
        self.closed = threading.Event()

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        now = time.monotonic()
        if self.first is not None:
            if (limits := _timeouts()) is None or now - self.at >= limits.second_signal:
                self.end(self.first)
        elif not isinstance(self.action, str) and frame is not None and frame.f_lineno is None:
            signal.raise_signal(number)  # a little later: pytest fails at a traceback without a line number
        else:
            self.first, self.at = int(number), now
            if not isinstance(self.action, str):
                raise self.action
            if self.action == _END:
                self.end(self.first)

    def end(self, number: int, text: str = "") -> None:
        """End the process now, and ignore further signals. ``text``: the line to print, "" for none."""
        try:
            if threading.current_thread() is threading.main_thread():
                _ignore()
            if (urls := sys.modules.get("hal_engine.transport.urls")) is not None:
                urls.release_all()  # its folders
            if (console := sys.modules.get(f"{__package__}.console")) is not None:
                (console.say if text else console.status)(text)
            if self.tidy is not None:
                self.tidy()
        finally:
            os._exit(128 + number)

    def await_end(self) -> None:
        """Wait for the first signal, then for the command's end; end the process by force if it does not come."""
        numbers = iter(lambda: next(iter(os.read(self.reading, 1)), None), None)
        number = next((number for number in numbers if number in NUMBERS), signal.SIGINT)
        limits = _timeouts()
        seconds = 0.0 if limits is None else grace + limits.signal
        if self.closed.wait(seconds):
            return
        try:
            if limits is not None:
                text = f"hal: ended by force: the signal could not be obeyed in order within {seconds:g} s"
                ending = threading.Thread(target=self.end, args=(self.first or number, text), daemon=True)
                ending.start()
                ending.join(limits.tidying)  # it may hang too
        finally:
            os._exit(128 + (self.first or number))


def _timeouts() -> Timeouts | None:
    """Return the timeouts, or None until they are loaded. They need the core, whose import may fail or be interrupted;
    before it the process has no resources to release."""
    return getattr(sys.modules.get("hal.timeouts"), "TIMEOUTS", None)


_watch = _Watch(is_last=False)


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
    _watch.end(_watch.first or signal.SIGINT)


@contextlib.contextmanager
def watched(*, to_the_end: bool) -> Iterator[None]:
    """Install the handlers, except for signals that this process was started to ignore (``nohup``, a background job).

    ``to_the_end``: the process ends with the command, so the handlers stay until the interpreter exits.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield
        return
    outer, _watch = _watch, _Watch(is_last=to_the_end)
    _watch.reading, _watch.writing = os.pipe()
    os.set_blocking(_watch.writing, False)
    former_pipe = signal.set_wakeup_fd(_watch.writing, warn_on_full_buffer=False)
    former = _install()
    ending = threading.Thread(target=_watch.await_end, name="hal-signals", daemon=True)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ending.start()  # it takes no SIGTERM (held)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if to_the_end:  # registered first, so called last: after it the interpreter removes the handlers
        atexit.register(_leave)
    try:
        yield
    finally:
        if not to_the_end:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_pipe)
            _watch.closed.set()
            os.close(_watch.writing)  # its thread reads the end
            ending.join()
            os.close(_watch.reading)
            _watch = outer


def _ignore() -> None:
    """Ignore all signals: only the exit is left, and its status is known."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _leave() -> None:
    """Prepare for the interpreter's own exit, in which no Python thread runs."""
    _ignore()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if (limits := _timeouts()) is not None:
        signal.alarm(math.ceil(limits.interpreter_end))


def _install() -> dict[int, Any]:
    """Set the handlers and return those that were replaced."""
    heeded = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, lambda number, frame: _watch.handle(number, frame)) for number in heeded}


os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # the pipe is its parent's


@contextlib.contextmanager
def _acting(action: str | type[BaseException], tidy: Callable[[], object] | None) -> Iterator[None]:
    former = _watch.action, _watch.tidy
    _watch.tidy, _watch.action = tidy, action
    try:
        if action != _NOTE and _watch.first is not None:  # noted before
            raise Interrupted if isinstance(action, str) else action
        yield
    finally:
        _watch.action, _watch.tidy = former


def at_once(tidy: Callable[[], object] | None = None) -> contextlib.AbstractContextManager[None]:
    """Inside, a signal calls ``tidy`` and ends the process at once. A signal noted before is raised here."""
    return _acting(_END, tidy)


def noted() -> contextlib.AbstractContextManager[None]:
    """Inside, a signal is only noted."""
    return _acting(_NOTE, _watch.tidy)


@contextlib.contextmanager
def raised(kind: type[BaseException] = Interrupted) -> Iterator[None]:
    """Inside, the first signal is raised as ``kind``. A signal noted before is raised here.

    In a callback, such as Hypothesis's of the garbage collector, the exception is lost, and the signal only noted; the
    interpreter's report of it is left out."""
    former = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if lost.exc_type is kind else former(lost)
    try:
        with _acting(kind, _watch.tidy):
            yield
    finally:
        sys.unraisablehook = former


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Enclose Paddle's import, which sets a handler that dumps a stack at SIGTERM, and any start of threads before it.

    Inside, every thread but one blocks SIGTERM, and that one has ours called in the main thread; at the end ours is set
    again. SIGURG, whose handler is empty, wakes the main thread from a wait. Processes that are started inside
    block SIGTERM too."""
    if _watch.writing < 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = threading.Event()
    passing = threading.Thread(target=_pass_on, args=(ended,), name="hal-sigterm", daemon=True)
    former = signal.signal(signal.SIGURG, lambda number, frame: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the thread inherits it
    try:
        passing.start()
        yield
    finally:
        _install()
        ended.set()
        signal.signal(signal.SIGURG, former or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _pass_on(ended: threading.Event) -> None:
    while not ended.is_set():
        if signal.sigtimedwait({signal.SIGTERM}, 0.1) is not None:
            _thread.interrupt_main(signal.SIGTERM)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)  # ends its wait, as SIGTERM would
