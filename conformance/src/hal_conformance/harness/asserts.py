"""Assertions about errors: their class and their text."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hal_core.errors import HalError

E = TypeVar("E", bound=Exception)
R = TypeVar("R")


def assert_raises(kind: type[E], act: Callable[[], object], why: str) -> E:
    """Assert that ``act`` raises an error of ``kind``, and return it. Any other outcome is a failed assertion."""
    __tracebackhide__ = True
    try:
        result = act()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{why}: raised {error!r}, but should raise {kind.__name__}") from error
    raise AssertionError(f"{why}: returned {result!r}, but should raise {kind.__name__}")


def assert_says(error: HalError, *, device: str, hook: str, argument: str | None = None) -> None:
    """Assert G26: the error names device, hook and argument, and the cure."""
    __tracebackhide__ = True
    assert error.device == device, f"{error!r} names device {error.device!r}, but should name {device!r}"
    assert error.hook == hook, f"{error!r} names hook {error.hook!r}, but should name {hook!r}"
    assert error.argument, f"{error!r} ({error}) names no argument"
    if argument is not None:
        assert error.argument == argument, f"{error!r} names {error.argument!r}, but should name {argument!r}"
    assert error.cure, f"{error!r} ({error}) names no cure"
    for part in (device, hook, error.argument, error.cure):
        assert part in str(error), f"the text {str(error)!r} does not contain {part!r}"


def assert_no_error(act: Callable[[], R], why: str) -> R:
    """Return what ``act`` returns; an error becomes a failed assertion with its cause."""
    __tracebackhide__ = True
    try:
        return act()
    except Exception as error:
        raise AssertionError(f"{why}: raised {error!r}, but should succeed") from error


@contextmanager
def in_time(what: str, seconds: float) -> Iterator[None]:
    """Context in which ``what`` must return within ``seconds``; a call that waits longer is interrupted.

    The interrupt is a signal, as a device may be used only from one thread. A call that waits outside Python continues,
    and in any thread but the main one no call is interrupted. The run's witness then names the test.
    """

    def late(*_: object) -> None:
        raise AssertionError(f"{what} did not return within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)  # 0: no other timer was set
        signal.signal(signal.SIGALRM, before)
