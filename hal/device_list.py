"""Listing of devices, from metadata and each plugin's static probe. No device is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hal_core import HalError, trace_of

from .contract import Verdict
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
    return tuple(_listed(entry, entries) for entry in entries)


def refused(entry: Entry, verdict: Verdict, entries: tuple[Entry, ...]) -> tuple[Status, str, str] | None:
    """Return status, reason and cure of a device that its metadata alone refuses; None if its plugin may be
    imported. ``verdict``: that on its contract range."""
    if not entry.allowed:
        return "excluded", f"{ALLOW_LIST} leaves it out", f"add {entry.distribution} to {ALLOW_LIST}"
    if entry.problem:  # such metadata may give neither a name nor a range
        return "broken", entry.problem, entry.error(entry.problem).cure
    if sum(other.name == entry.name for other in entries if other.allowed) > 1:
        error = same_name(entries, entry.name)
        return "duplicate", error.what, error.cure
    return ("mismatch", verdict.problem, verdict.cure) if verdict.problem else None


def _listed(entry: Entry, entries: tuple[Entry, ...]) -> Listed:
    verdict = entry.verdict

    def row(status: Status, reason: str = "", cure: str = "", trace: str = "") -> Listed:
        return Listed(
            entry.name, entry.distribution, entry.version, verdict.range, entry.priority, status, reason, cure, trace
        )

    if refusal := refused(entry, verdict, entries):
        return row(*refusal)
    try:
        answer = probe(entry, load(entry))
    except HalError as error:
        return row("broken", error.what.removeprefix(f"{entry.who}: "), error.cure, trace_of(error))
    return row("available" if answer.available else "unavailable", answer.reason, answer.cure)
