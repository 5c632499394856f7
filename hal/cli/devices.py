"""``hal devices``: a table or JSON of the installed devices. Imports neither NumPy nor a framework."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hal_core import HalError

from hal import contract
from hal.discovery import OBSERVED, OBSERVERS, installed_in
from hal.listing import Listed, devices
from hal.observing import chosen
from hal.selection import NOTHING_INSTALLED, select


def show(*, as_json: bool, opened: bool, timeout: float) -> None:
    """Print the listing; with ``opened`` also what each available device turns out to offer."""
    with contextlib.redirect_stdout(sys.stderr):  # whatever a plugin prints while it is probed
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
        report = {"contract": contract.contract_version(), "selected": selected, "why": why, "devices": listed}
        report["observers"] = observers
        print(json.dumps(report, indent=2))
        return
    _print_table(rows)
    for one in observers:
        use = f"used: {OBSERVED} names it" if one["used"] else f"not used: {OBSERVED} does not name it"
        print(f"\nobserver {one['name']}: {one['distribution']} {one['version']}, {use}")
    print(f"\nselected without a name: {selected}" if selected else f"\nnone is selected without a name: {why}")
    for row, result in results.items():
        _print_opened(row.name, result)


def _selected() -> tuple[str | None, str]:
    """What ``open_device()`` would take, asked of the code that takes it, or why it would take none."""
    log = logging.getLogger("hal")
    level = log.level
    log.setLevel(logging.ERROR)  # the table already says what is passed over
    try:
        choice = select()
    except HalError as error:
        return None, " ".join(str(error).split())
    else:
        return (f"{choice.entry.name}:{choice.index}" if choice.index else choice.entry.name), ""
    finally:
        log.setLevel(level)


def _print_table(rows: tuple[Listed, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        print(f"no device is installed ({NOTHING_INSTALLED})")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("device", "distribution", "contract", "priority", "status"):
        table.add_column(heading, no_wrap=heading != "status", overflow="fold")
    styles = {"available": "green", "unavailable": "yellow", "excluded": "dim"}
    for row in rows:
        status = Text(row.status, style=styles.get(row.status, "red"))
        reason = " ".join(row.reason.split())
        cure = " ".join(row.cure.split())
        status.append(f": {reason}" if reason else "", style="default")
        status.append(f" ({cure})" if cure else "", style="default")
        wrong = row.status == "mismatch"
        cells = (
            Text(row.name),
            Text(f"{row.distribution} {row.version}"),
            Text(row.contract + (" no" if wrong else " ok"), style="red" if wrong else ""),
            Text(str(row.priority) if row.priority >= 0 else "by name only"),
            status,
        )
        table.add_row(*cells)
    if sys.stdout.isatty():
        Console().print(table)
        return
    # A pipe has no width: let each row keep its line, so that grep finds what belongs together.
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None, force_terminal=False).print(table)
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _print_opened(name: str, result: Mapping[str, Any]) -> None:
    if result.get("error"):
        print(f"\n{name}: not opened: {result['error']}")
        return
    print(f"\n{name}: opened in {result['seconds']:.1f} s")
    for ability, value in result["capabilities"].items():
        print(f"  {ability}: {_word(value)}")
    for hook, reason in result["fallbacks"].items():
        print(f"  {hook} falls back: {reason}")
    if result["note"]:
        print(f"  {result['note']}")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "none"
