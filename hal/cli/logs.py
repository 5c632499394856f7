"""Log records of hal, printed as lines of the command."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .console import say

VARIABLE = "HAL_LOG"
"""Environment variable with the lowest level that is shown."""


def level() -> int | None:
    """Return the :mod:`logging` level that ``HAL_LOG`` names; None if it is unset.

    Raises :class:`hal_core.InvalidValue` if it names no level.
    """
    if not (word := os.environ.get(VARIABLE, "").strip()):
        return None
    if word.upper() in (levels := ("DEBUG", "INFO", "WARNING", "ERROR")):
        return getattr(logging, word.upper())  # type: ignore[no-any-return]
    from hal_core import InvalidValue

    raise InvalidValue(f"{word!r}", cure=f"give {', '.join(levels[:-1])} or {levels[-1]}", argument=VARIABLE)


class _Printing(logging.Handler):
    """Log handler that prints each record as a line of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def printed(lowest: int | None, *, without: str = "") -> Iterator[None]:
    """Print hal's log records from level ``lowest`` up (None: the configured level), except those of the module
    ``without``."""
    handler = _Printing()
    handler.setFormatter(logging.Formatter("hal: %(message)s"))
    handler.addFilter(lambda record: record.module != without)
    log = logging.getLogger("hal")
    former = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [handler], False
    if lowest is not None:
        log.setLevel(lowest)
    try:
        yield
    finally:
        log.handlers, log.propagate = former[:2]
        log.setLevel(former[2])


class Few(logging.Filter):
    """Lets ``most`` records of a logger pass in a second, and counts the others: the next one that passes says how
    many. For what clients of a server cause."""

    def __init__(self, most: int = 3, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most, self._clock = most, clock
        self._seen: dict[str, tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """See :class:`logging.Filter`."""
        now = self._clock()
        since, count = self._seen.get(record.name, (now, 0))
        if now - since >= 1:
            if (left := count - self._most) > 0:
                record.msg, record.args = f"{record.getMessage()} (and {left} lines like it before)", ()
            since, count = now, 0
        self._seen[record.name] = since, count + 1
        return count < self._most


@contextmanager
def of_libraries() -> Iterator[None]:
    """Print warnings of all other loggers as lines of the command, at most a few a second of each."""
    handler, root = _Printing(), logging.getLogger()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("hal: %(message)s"))
    handler.addFilter(Few())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
