"""``hal devices``: a table or JSON of the installed devices. Imports neither NumPy nor a framework."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from hal_core import HalError, InvalidValue

from hal import contract
from hal.device_list import Listed, devices
from hal.discovery import OBSERVED, OBSERVERS, installed_in
from hal.observing import chosen
from hal.selection import NOTHING_INSTALLED, select
from hal.timeouts import TIMEOUTS

from . import failures
from .console import fitted, shown
from .failures import check_seconds, one_line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

_REASON_COLUMNS = 40
"""Least columns for the last column of the table. Narrower terminals get a paragraph a device."""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    opened: Annotated[
        bool, typer.Option("--open", help="Open each available device in a subprocess and show what it can do.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --open: time limit for each device (default 120).")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of plugins that failed.")] = False,
) -> None:
    """List the installed devices: distribution, contract, whether each can be used here, and why not."""
    failures.verbose = verbose
    if timeout is not None:
        check_seconds(timeout)
        if not opened:
            raise InvalidValue("nothing is opened", cure="give --open as well, or leave it out", argument="--timeout")
    show(
        as_json=as_json,
        opened=opened,
        timeout=TIMEOUTS.device_open if timeout is None else timeout,
        verbose=verbose,
    )


def show(*, as_json: bool, opened: bool, timeout: float, verbose: bool = False) -> None:
    """Print the listing. ``opened`` adds what each available device offers, ``verbose`` the tracebacks of plugins that
    failed."""
    with contextlib.redirect_stdout(sys.stderr):  # a plugin may print while it is probed
        rows = devices()
        selected, why = _selected()
        used = chosen()
    observers = [
        {"name": one.name, "distribution": one.distribution, "version": one.version, "used": one in used}
        for one in installed_in(OBSERVERS)
    ]
    results: dict[Listed, dict[str, Any]] = {}
    if opened:
        from .opened import open_in_subprocess

        results = {row: open_in_subprocess(row.name, timeout) for row in rows if row.status == "available"}
    if as_json:
        listed = [{**asdict(row), "opened": results.get(row)} for row in rows]
        for facts in [] if verbose else listed:
            del facts["trace"]
        report = {"contract": contract.contract_version(), "selected": selected, "why": why, "devices": listed}
        report["observers"] = observers
        print(json.dumps(report, indent=2))
        return
    if rows:
        _print_devices(rows)
    else:
        _say(f"no device is installed ({NOTHING_INSTALLED})")
    for one in observers:
        use = f"used: {OBSERVED} names it" if one["used"] else f"not used: {OBSERVED} does not name it"
        _say(f"\nobserver {one['name']}: {one['distribution']} {one['version']}, {use}")
    _say(f"\nselected without a name: {selected}" if selected else f"\nnone is selected without a name: {why}")
    for row, result in results.items():
        _print_opened(row.name, result)
    traces = [(row.name, row.trace or results.get(row, {}).get("trace", "")) for row in rows if verbose]
    for name, trace in traces:
        if trace:
            _say(f"\n{name}: {trace.rstrip()}")


def _selected() -> tuple[str | None, str]:
    """Return the device that ``open_device()`` would select, or the reason why it selects none."""
    log = logging.getLogger("hal")
    level = log.level
    log.setLevel(logging.ERROR)  # the table already shows what is skipped
    try:
        choice = select()
    except HalError as error:
        return None, " ".join(str(error).split())
    else:
        return (f"{choice.entry.name}:{choice.index}" if choice.index else choice.entry.name), ""
    finally:
        log.setLevel(level)


def _print_devices(rows: tuple[Listed, ...]) -> None:
    """Print a table, or a paragraph a device on a terminal that is too narrow."""
    from rich.console import Console

    table, before = _table(rows)
    if sys.stdout.isatty():
        console = Console()
        console.print(table if console.width - before >= _REASON_COLUMNS else _paragraphs(rows))
        return
    # A pipe has no width: each row stays on one line, so that grep finds all of it.
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None, force_terminal=False).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _table(rows: tuple[Listed, ...]) -> tuple[Table, int]:
    """Return the table, and the columns that precede its last one."""
    from rich.table import Table
    from rich.text import Text

    headings = ("device", "distribution", "contract", "priority", "status")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != "status", overflow="fold")
    widths = [len(heading) + 2 for heading in headings[:-1]]
    for row in rows:
        cells = _cells(row)
        widths = [max(width, cell.cell_len + 2) for width, cell in zip(widths, cells, strict=False)]
        why = _why(row)
        table.add_row(*cells[:-1], Text.assemble(cells[-1], f": {why}" if why else ""))
    return table, sum(widths)


def _paragraphs(rows: tuple[Listed, ...]) -> Group:
    """Return the same as paragraphs, for a narrow terminal."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[Text | Padding] = []
    for row in rows:
        name, distribution, contract_range, priority, status = _cells(row)
        below = [Text.assemble(distribution, ", contract ", contract_range, ", priority ", priority)]
        below += [Text(why)] if (why := _why(row)) else []
        parts += [Text.assemble(name, ": ", status), *(Padding(line, (0, 0, 0, 2), expand=False) for line in below)]
    return Group(*parts)


def _cells(row: Listed) -> tuple[Text, Text, Text, Text, Text]:
    """Return a row's cells: device, distribution, contract, priority, and the first word of its status."""
    from rich.text import Text

    styles = {"available": "green", "unavailable": "yellow", "excluded": "dim"}
    wrong = row.status == "mismatch"
    return (
        Text(shown(row.name, sys.stdout)),
        Text(shown(f"{row.distribution} {row.version}", sys.stdout)),
        Text(shown(row.contract + (" no" if wrong else " ok"), sys.stdout), style="red" if wrong else ""),
        Text(str(row.priority) if row.priority >= 0 else "by name only"),
        Text(row.status, style=styles.get(row.status, "red")),
    )


def _why(row: Listed) -> str:
    """Return the reason of a status with its cure in parentheses, on one line."""
    reason, cure = one_line(row.reason), one_line(row.cure)
    return shown(" ".join(filter(None, (reason, f"({cure})" if cure else ""))), sys.stdout)


def _print_opened(name: str, result: Mapping[str, Any]) -> None:
    if result.get("error"):
        _say(f"\n{name}: not opened: {result['error']}")
        return
    _say(f"\n{name}: opened in {result['seconds']:.1f} s")
    for ability, value in result["capabilities"].items():
        _say(f"  {ability}: {_word(value)}")
    for hook, reason in result["fallbacks"].items():
        _say(f"  {hook} falls back: {reason}")
    if result["note"]:
        _say(f"  {result['note']}")


def _say(text: str) -> None:
    """Print text, wrapped between words on a terminal."""
    print(fitted(shown(text, sys.stdout), sys.stdout, every=True))


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "none"
