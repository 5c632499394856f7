"""Help pages of the commands, laid out for the terminal's width."""

from __future__ import annotations

import shutil
import textwrap

TYPE_CHECKING = False  # saves the import of typing, as in hal/__init__.py
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_COLUMNS = 100
"""Most columns of a page: longer lines are hard to read."""
_NARROW = 56
"""Below this width, an option's description is on the line below its name."""
_NAMES = 26
"""Most columns for names. A longer name has its description on the next line."""

TOGETHER = "\N{NO-BREAK SPACE}"
"""A blank at which a line is not broken."""

Row = tuple[str, str]
"""A name and its description."""


def columns() -> int:
    """Return the width of a page in columns."""
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


def page(usage: str, about: str, sections: Iterable[tuple[str, Sequence[Row]]], width: int) -> str:
    """Return a help page: usage, description, and tables with their titles."""
    parts = [_wrapped(f"usage: {usage}", width, " " * 7), *(_wrapped(text, width) for text in about.split("\n\n"))]
    for title, rows in sections:
        if rows:
            parts.append("\n".join([f"{title}:" if title else "", *_table(rows, width)]).lstrip("\n"))
    return "\n\n".join(part for part in parts if part).replace(TOGETHER, " ")


def _table(rows: Sequence[Row], width: int) -> list[str]:
    if width < _NARROW:
        return [line for name, text in rows for line in (*_lines(name, width, "  "), *_lines(text, width, " " * 6))]
    indent = 2 + min(max(len(name) for name, _ in rows), _NAMES) + 2
    lines = []
    for name, text in rows:
        wrapped = _lines(text, width, " " * indent) or [""]
        first = f"  {name}".ljust(indent)
        lines += [first.rstrip(), *wrapped] if len(first) > indent else [first + wrapped[0][indent:], *wrapped[1:]]
    return [line.rstrip() for line in lines]


def _lines(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _wrapped(text: str, width: int, indent: str = "") -> str:
    flat = " ".join(text.split())
    return textwrap.fill(flat, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
