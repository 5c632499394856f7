"""Findings of a run: each test's outcome, and the facts of device, machine and kit. If a case ends the cases' process,
the next process continues with the same findings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hal_core.errors import InvalidValue

from ..harness.claims import ALLOWED, CLAIMS, Claim
from ..harness.guarantees import BY_NUMBER
from .machine import machine
from .outcomes import (
    EXPECTED,
    FAILED,
    IN_PART,
    LEFT_OUT,
    NOT_CHOSEN,
    NOT_RUN,
    PASSED,
    SKIPPED,
    UNEXPECTED,
    Outcome,
    Report,
)
from .rendering import lines, render


@dataclass
class Findings:
    """The findings of one run. ``only``: the chosen guarantees, all if empty."""

    only: set[int] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By the node of pytest's."""
    present: set[str] = field(default_factory=set)
    """Names of all tests, chosen or not."""
    device: dict[str, Any] = field(default_factory=dict)
    """The opened device's part of the header."""
    expected: dict[str, str] = field(default_factory=dict)
    """The plugin's list of expected failures."""
    claims: dict[Claim, None] = field(default_factory=lambda: CLAIMS)
    problems: list[str] = field(default_factory=list)
    unfinished: str = ""
    """Why tests are not run, through no fault of the device."""
    stopped: str = ""
    """Why the run ended before its last test."""
    reproduce: str = ""
    tell: Callable[..., None] = lambda **found: None
    """Called with each finding, for another process."""
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    began: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self.claims.clear()  # those of an earlier run

    def end(self, status: int | pytest.ExitCode) -> None:
        """Note how a run of pytest has ended, unless that is known."""
        if self.problems:
            return
        if status == pytest.ExitCode.INTERRUPTED:
            self.unfinished = "interrupted"
        elif status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.problems.append(f"pytest ended early: {pytest.ExitCode(status).name.lower().replace('_', ' ')}")
        elif not self.outcomes:
            self.problems.append("no guarantee was checked")

    def failed(self, entry: Outcome, kind: str, error: str, cause: str, reproduce: str) -> None:
        """Note that a test has failed: as the plugin expects, or for a cause of its own or of an earlier failure."""
        entry.kind, entry.error, entry.outcome = kind, error, FAILED
        if (name := entry.test.partition("[")[0]) in self.expected:
            entry.outcome, entry.reason = EXPECTED, self.expected[name]
            return
        entry.reproduce, entry.cause = reproduce, cause
        before = [one for one in self.outcomes.values() if one.cause == cause and one is not entry]
        entry.same_as = (before[0].same_as or before[0].test) if before else ""

    def report(self) -> Report:
        """Return the report of the run as it is now."""
        entries = [self._entry(number) for number in BY_NUMBER]
        header = {**machine(), "date": self.date, "seconds": round(monotonic() - self.began, 1), **self.device}
        skips = Counter(one.reason for one in self.outcomes.values() if one.outcome == SKIPPED)
        header |= {"reproduce": self.reproduce, "skips": dict(skips.most_common())}
        return Report(header, entries, [*self.problems, *self._stale()], self.unfinished, self.stopped)

    def write(self, targets: Iterable[str], write: Callable[[str], None] | None = None) -> Report:
        """Write the report to files, and as lines of text by ``write``."""
        report = self.report()
        for target in targets:
            try:
                Path(target).write_text(render(report, target), encoding="utf-8")
            except OSError as error:  # the disk is full, or the folder was removed meanwhile
                what = f"the report was not written to {target!r}: {error.strerror}; make room, run again"
                report.problems.append(what)
        if write and self.device:
            for line in lines(report):
                write(line)
        return report

    def _entry(self, number: int) -> dict[str, Any]:
        guarantee = BY_NUMBER[number]
        mine = [outcome for outcome in self.outcomes.values() if outcome.guarantee == number]
        claims = [claim for claim in self.claims if claim.guarantee == number]
        for one in mine:
            if one.outcome == EXPECTED or one.reason == LEFT_OUT:
                claims.append(Claim(number, ALLOWED, f"{one.test}: {one.reason}"))
        return {
            "guarantee": guarantee.name,
            "hook": guarantee.hook,
            "gist": guarantee.gist,
            "status": _status(mine),
            "note": _note(mine, self.only, number),
            "claims": [str(claim) for claim in claims],
            "tests": [asdict(outcome) for outcome in mine],
        }

    def _stale(self) -> list[str]:
        """Return the errors in the plugin's list of expected failures."""
        problems = []
        for name, reason in self.expected.items():
            if name not in self.present:
                problems.append(f"expected failure {name!r} is not a test of the kit; remove it, or correct the name")
            if not reason.strip():
                problems.append(f"expected failure {name!r} has no reason; write one")
        for outcome in self.outcomes.values():
            if outcome.outcome == UNEXPECTED:
                problems.append(f"{outcome.test} passes, but is listed as an expected failure; remove the entry")
        return problems


def check_target(path: str, option: str) -> None:
    """Raise :class:`InvalidValue` if the report cannot be written, before the run rather than after it."""
    target = Path(path)
    try:
        if target.is_dir():
            what = "is a folder"
        elif not target.parent.is_dir():
            what = f"cannot be written: the folder {str(target.parent)!r} does not exist"
        else:
            writable = os.access(target if target.exists() else target.parent, os.W_OK)
            what = "" if writable else "cannot be written: no permission"
    except OSError as error:  # a name that is too long
        what = f"cannot be written: {error.strerror}"
    if what:
        raise InvalidValue(f"{path!r} {what}", cure="name a file in a folder that can be written", argument=option)


def _status(outcomes: Iterable[Outcome]) -> str:
    found = {outcome.outcome for outcome in outcomes}
    for status in (FAILED, UNEXPECTED, NOT_RUN, EXPECTED):
        if status in found:
            return {UNEXPECTED: "failed", EXPECTED: "expected failure"}.get(status, status)
    return "checked" if PASSED in found else "skipped"


def _note(outcomes: Sequence[Outcome], wanted: set[int], number: int) -> str:
    """Return why a guarantee, or a part of it, was not checked."""
    reasons = [outcome.reason for outcome in outcomes if outcome.outcome in (SKIPPED, EXPECTED, UNEXPECTED)]
    left = [outcome.reason for outcome in outcomes if outcome.outcome == NOT_RUN]
    reasons += [reason or NOT_RUN for reason in left if any(left) or len(left) < len(outcomes)]
    if not outcomes:
        reasons = [NOT_CHOSEN] if wanted and number not in wanted else ["no test was collected"]
    counts = Counter(reasons)
    several = len(outcomes) > 1
    notes = [IN_PART] if outcomes and wanted and number not in wanted else []
    return "; ".join([*notes, *(f"{n} of {len(outcomes)}: {r}" if several else r for r, n in counts.items())])
