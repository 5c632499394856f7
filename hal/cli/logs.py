"""Log records of hal, printed as lines of the command."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
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


class _Said(logging.Handler):
    """Log handler that prints each record as a line of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def said(lowest: int | None, *, without: str = "") -> Iterator[None]:
    """Print hal's log records from level ``lowest`` up (None: the configured level), except those of the module
    ``without``."""
    handler = _Said()
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
