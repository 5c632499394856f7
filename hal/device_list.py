"""Listing of devices, from metadata and each plugin's static probe. No device is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hal_core import ContractMismatch, HalError, trace_of

from .discovery import ALLOW_LIST, Entry, installed, load, probe, same_name

Status = Literal["available", "unavailable", "broken", "mismatch", "duplicate", "excluded"]


@dataclass(frozen=True, slots=True)
class Listed:
    """One installed device. ``contract`` is the range its distribution states; ``priority`` below 0: never automatic.

    ``status``: available; unavailable (no driver, no chip: the plugin is sound); broken (does not import, or breaks
    the contract); mismatch (made for another contract, not imported); duplicate (two distributions claim the name,
    not imported); excluded (left out by ``HAL_PLUGINS``, not imported).
    """

    name: str
    distribution: str
    version: str
    contract: str
    priority: int
    status: Status
    reason: str = ""
    cure: str = ""
    trace: str = field(default="", compare=False, repr=False)
    """Traceback of the plugin's own code that failed."""


def devices() -> tuple[Listed, ...]:
    """Return every installed device, best priority first. A broken plugin is listed as broken and hides no other."""
    entries = installed()
    allowed = [entry.name for entry in entries if entry.allowed]
    return tuple(_listed(entry, entries, allowed.count(entry.name) > 1) for entry in entries)


def _listed(entry: Entry, entries: tuple[Entry, ...], claimed_twice: bool) -> Listed:
    verdict = entry.verdict

    def row(status: Status, reason: str = "", cure: str = "", trace: str = "") -> Listed:
        return Listed(
            entry.name, entry.distribution, entry.version, verdict.range, entry.priority, status, reason, cure, trace
        )

    if not entry.allowed:
        return row("excluded", f"{ALLOW_LIST} leaves it out", f"add {entry.distribution} to {ALLOW_LIST}")
    if claimed_twice:
        error = same_name(entries, entry.name)
        return row("duplicate", error.what, error.cure)
    try:
        answer = probe(entry, load(entry))
    except ContractMismatch:
        return row("mismatch", verdict.problem, verdict.cure)
    except HalError as error:
        return row("broken", error.what.removeprefix(f"{entry.who}: "), error.cure, trace_of(error))
    return row("available" if answer.available else "unavailable", answer.reason, answer.cure)
