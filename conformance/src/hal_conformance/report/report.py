"""The kit's findings: each guarantee checked, skipped or failed, with a line to reproduce each failure."""

from __future__ import annotations

import os
import platform
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hal_core.errors import InvalidValue, trace_of

from ..harness.claims import CLAIMS
from ..harness.guarantees import BY_NUMBER, GUARANTEES
from .outcomes import NOT_CHOSEN, NOT_RUN, Outcome, Report, clipped
from .reproduction import Reproduction

if TYPE_CHECKING:
    from ..kit import Effort, Kit

PROFILE = "HAL_PROFILE"


def bears(item: pytest.Item) -> set[int]:
    """Return the guarantee that a test checks, and its additional ones."""
    mark = item.get_closest_marker("guarantee")
    return {int(mark.args[0]), *mark.args[3]} if mark else set()


def chosen(text: str) -> set[int]:
    """Return the numbers in "G3,G15". Raises :class:`InvalidValue` for anything else."""
    numbers = set()
    for part in filter(None, re.split(r"[\s,]+", text)):
        match = re.fullmatch(r"[Gg]?0*(\d+)", part)
        if match is None or int(match[1]) not in BY_NUMBER:
            raise InvalidValue(
                f"{part!r} is not a guarantee", cure=f"G1 to G{len(GUARANTEES)}, separated by commas", argument="only"
            )
        numbers.add(int(match[1]))
    return numbers


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


def effort(config: pytest.Config) -> Effort:
    """Return the requested profile, examples and seed. Quick always uses the same seed; other profiles draw one."""
    from ..kit import HANG, PROFILES, Effort

    profile = config.getoption("--hal-profile") or os.environ.get(PROFILE) or "default"
    if profile not in PROFILES:
        raise InvalidValue(f"profile {profile!r}", cure=f"one of {', '.join(PROFILES)}", argument="profile")
    given, examples = config.getoption("--hal-seed"), config.getoption("--hal-examples")
    if given is not None and given < 0:
        raise InvalidValue(f"{given}", cure="give a whole number of at least 0", argument="seed")
    if examples < 0:
        raise InvalidValue(f"{examples}", cure="give at least 1, or 0 for the profile's", argument="examples")
    seed = given if given is not None else 0 if profile == "quick" else secrets.randbelow(2**31)
    shrink, hang = not config.getoption("--hal-no-shrink"), config.getoption("--hal-hang") or HANG
    return Effort(profile, examples, seed, shrink, hang)


class Recorder:
    """Collects the outcomes of a session and makes its report. ``present``: names of all tests, chosen or not."""

    def __init__(self, config: pytest.Config, present: set[str]) -> None:
        self.config, self.present, self.reproduction = config, present, Reproduction(config)
        self.kit: Kit | None = None
        self.device: dict[str, Any] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.report: Report | None = None
        self.stopped = ""
        """Why the run ended at the first failure."""
        self._shown = False
        CLAIMS.clear()
        self.unfinished = ""
        """Why tests are not run, through no fault of the device."""

    def await_all(self, items: Iterable[pytest.Item], number: Callable[[pytest.Item], int]) -> None:
        """Record the chosen tests, so that those not reached are reported as not run."""
        self.outcomes = {item.nodeid: Outcome(item.name, number(item)) for item in items}

    def failed(self, item: pytest.Item) -> bool:
        """Return True if the test's call has failed, expected or not."""
        found = self.outcomes.get(item.nodeid)
        return found is not None and found.outcome in ("failed", "expected")

    def note(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, number: int) -> None:
        """Record one phase of a test. The worst phase counts."""
        name = item.name.partition("[")[0]
        entry = self.outcomes.setdefault(item.nodeid, Outcome(item.name, number))
        entry.seconds += call.duration
        if report.skipped:
            entry.outcome = NOT_RUN if self.unfinished else "skipped"
            entry.reason = call.excinfo.value.msg if call.excinfo else ""  # type: ignore[attr-defined]
        elif report.failed:
            self._note_failure(entry, call, report, name)
        elif report.when == "call" and entry.outcome == NOT_RUN:
            entry.outcome = "passed"
            if name in self.expected():
                entry.outcome, entry.reason = "unexpected", self.expected()[name]

    def _note_failure(self, entry: Outcome, call: pytest.CallInfo[None], report: pytest.TestReport, name: str) -> None:
        assert call.excinfo is not None
        entry.kind = _kind(call.excinfo.value)
        entry.error = message_of(call.excinfo.value)
        entry.outcome = "failed"
        if name in self.expected() and report.when == "call":
            entry.outcome, entry.reason = "expected", self.expected()[name]
            report.outcome, report.wasxfail = "skipped", entry.reason
        else:
            entry.reproduce = self.reproduction.line(self.kit, f"G{entry.guarantee}")
            entry.cause = cause_of(call.excinfo.value, entry.test.partition("[")[2].removesuffix("]"))
            before = [one for one in self.outcomes.values() if one.cause == entry.cause and one is not entry]
            if before:
                entry.same_as = before[0].same_as or before[0].test
                report.longrepr, report.sections = f"of the same cause as {entry.same_as}: {entry.kind}", []
            else:
                report.sections.append(("reproduce with", entry.reproduce))

    def outcome_of(self, nodeid: str) -> str:
        """Return how a test has ended."""
        found = self.outcomes.get(nodeid)
        return found.outcome if found is not None else NOT_RUN

    def first_failure(self, nodeid: str) -> list[str]:
        """Return what to print of a test that is the first to fail; [] for every other test."""
        if self._shown or self.outcome_of(nodeid) != "failed":
            return []
        self._shown = True
        found = self.outcomes[nodeid]
        message, _, trace = found.error.partition("\nTraceback ")
        place = [line.strip() for line in trace.splitlines() if line.startswith("  File ")][-1:]
        text = [clipped(line) for line in (*message.splitlines()[:3], *place)]
        return [f"first failure: G{found.guarantee} {found.test}: {found.kind}", *(f"    {line}" for line in text)]

    def expected(self) -> dict[str, str]:
        """Return the plugin's list of expected failures."""
        return dict(self.kit.subject.support.expected_failures) if self.kit else {}

    def finish(self, status: int | pytest.ExitCode) -> bool:
        """Make and write the report; return true if it must fail the session."""
        problems = self._problems()
        if status == pytest.ExitCode.INTERRUPTED:
            self.unfinished = "interrupted"
        elif status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            problems.append(f"pytest ended early: {pytest.ExitCode(status).name.lower().replace('_', ' ')}")
        elif not self.outcomes:
            problems.append("no guarantee was checked")
        entries = [self._entry(number) for number in BY_NUMBER]
        self.report = Report(self.header(), entries, problems, self.unfinished, self.stopped)
        for target in self.config.getoption("--hal-report"):
            self._write(self.report, target)
        return not self.report.ok

    @staticmethod
    def _write(report: Report, target: str) -> None:
        from .rendering import render

        try:
            Path(target).write_text(render(report, html=target.endswith((".html", ".htm"))), encoding="utf-8")
        except OSError as error:  # the disk is full, or the folder was removed meanwhile
            report.problems.append(f"the report was not written to {target!r}: {error.strerror}; make room, run again")

    def opened(self, kit: Kit) -> None:
        """Record the device under test, once it is open."""
        self.kit = kit
        self.reproduction.opened(kit.device.name, kit.capabilities.substituted)
        abilities = {f.name: getattr(kit.capabilities, f.name) for f in fields(kit.capabilities)}
        self.device = {
            "device": kit.bound.name,
            "origin": kit.subject.origin,
            "policy": type(kit.bound.policy).__qualname__,
            "capabilities": {name: value for name, value in abilities.items() if name != "fallbacks"},
            "fallbacks": dict(kit.capabilities.fallbacks),
            "effort": asdict(kit.effort),
        }

    def header(self) -> dict[str, Any]:
        """Return what ran, on which device, with which versions."""
        names = ("paddle-hal-core", "numpy", "pluggy", "hypothesis", "pytest")
        versions = {"python": platform.python_version()} | {name: _version(name) for name in names}
        return {"versions": versions, **self.device, "reproduce": self.reproduction.line(self.kit)}

    def _entry(self, number: int) -> dict[str, Any]:
        guarantee = BY_NUMBER[number]
        mine = [outcome for outcome in self.outcomes.values() if outcome.guarantee == number]
        return {
            "guarantee": guarantee.name,
            "hook": guarantee.hook,
            "gist": guarantee.gist,
            "status": _status(mine),
            "note": _note(mine, chosen(self.config.getoption("--hal-only")), number),
            "claims": [str(claim) for claim in CLAIMS if claim.guarantee == number],
            "tests": [asdict(outcome) for outcome in mine],
        }

    def _problems(self) -> list[str]:
        problems = []
        for name, reason in self.expected().items():
            if name not in self.present:
                problems.append(f"expected failure {name!r} is not a test of the kit; remove it, or correct the name")
            if not reason.strip():
                problems.append(f"expected failure {name!r} has no reason; write one")
        for outcome in self.outcomes.values():
            if outcome.outcome == "unexpected":
                problems.append(f"{outcome.test} passes, but is listed as an expected failure; remove the entry")
        return problems

    def summarize(self, write: Callable[[str], None]) -> None:
        """Print the report as text."""
        from .rendering import lines

        if self.report is not None and self.device:
            for line in lines(self.report):
                write(line)


def message_of(error: BaseException) -> str:
    """Return the message of an error, its notes (the draws of an example), and the traceback of a foreign one."""
    notes = [str(note) for note in getattr(error, "__notes__", ()) if "data=data(...)" not in str(note)]
    trace = trace_of(error).removesuffix("".join(f"{note}\n" for note in getattr(error, "__notes__", ())))
    return "\n".join([str(error), *notes, *trace.splitlines()])


_DIFFERS = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|[+-]?\d[\d.e+-]*|[\[(][\d\s.,()\[\]#-]*[\])]")
"""Parts of a message that belong to the example, and not to the cause."""


_WAITED = re.compile(r"the primitive (\w+) \(.*?\), called for .*, waited for the held stream")


def cause_of(error: BaseException, case: str = "") -> str:
    """Return the common part of failures with one cause: the primitive that waited, or else class, place and message,
    without the example's values and the name of the test's ``case``."""
    outer = error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    while error.__cause__ is not None and not isinstance(error.__cause__, BaseExceptionGroup):
        error = error.__cause__
    for one in (outer, error):
        for text in (str(one), *getattr(one, "__notes__", ())):
            if found := _WAITED.search(str(text)):
                return f"{found[1]} waited"
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    first = re.sub(r"^after .*?: ", "", (str(error).splitlines() or [""])[0])
    first = first.replace(case, "#") if case else first
    return f"{type(error).__name__} at {place}: {_DIFFERS.sub('#', first)}"


def _kind(error: BaseException) -> str:
    """Return the error's type; for a group that Hypothesis reports, the type of its parts."""
    kinds = {_kind(part) for part in error.exceptions} if isinstance(error, BaseExceptionGroup) else set()
    return kinds.pop() if len(kinds) == 1 else type(error).__name__


def _status(outcomes: Iterable[Outcome]) -> str:
    found = {outcome.outcome for outcome in outcomes}
    for status in ("failed", "unexpected", NOT_RUN, "expected"):
        if status in found:
            return {"unexpected": "failed", "expected": "expected failure"}.get(status, status)
    return "checked" if "passed" in found else "skipped"


def _note(outcomes: list[Outcome], wanted: set[int], number: int) -> str:
    """Return why a guarantee, or a part of it, was not checked."""
    reasons = [outcome.reason for outcome in outcomes if outcome.outcome in ("skipped", "expected", "unexpected")]
    left = [outcome.reason for outcome in outcomes if outcome.outcome == NOT_RUN]
    reasons += [reason or NOT_RUN for reason in left if any(left) or len(left) < len(outcomes)]
    if not outcomes:
        reasons = [NOT_CHOSEN] if wanted and number not in wanted else ["no test was collected"]
    counts = {reason: reasons.count(reason) for reason in reasons}
    several = len(outcomes) > 1
    return "; ".join(f"{n} of {len(outcomes)}: {r}" if several else r for r, n in counts.items())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
