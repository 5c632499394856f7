"""What hal logs, as lines of the command's own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .console import say

VARIABLE = "HAL_LOG"
"""The environment variable that names the lowest level that is shown."""


def level() -> int | None:
    """Return the level that ``HAL_LOG`` names, of :mod:`logging`; None where it is unset.

    Raises :class:`hal_core.InvalidValue` for another word.
    """
    if not (word := os.environ.get(VARIABLE, "").strip()):
        return None
    if word.upper() in (levels := ("DEBUG", "INFO", "WARNING", "ERROR")):
        return getattr(logging, word.upper())  # type: ignore[no-any-return]
    from hal_core import InvalidValue

    raise InvalidValue(f"{word!r}", cure=f"give {', '.join(levels[:-1])} or {levels[-1]}", argument=VARIABLE)


class _Said(logging.Handler):
    """Says each record as a line of the command's own."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


@contextmanager
def said(lowest: int | None, *, without: str = "") -> Iterator[None]:
    """Say hal's records from the level ``lowest`` on (None: as it is set), but for those of the module ``without``."""
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
