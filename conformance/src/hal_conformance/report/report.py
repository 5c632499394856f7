"""The kit's findings: each guarantee checked, skipped or failed, with a line to reproduce each failure."""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

import pytest
from hal_core.errors import InvalidValue, trace_of

from ..harness.guarantees import BY_NUMBER, GUARANTEES
from .findings import Findings
from .outcomes import EXPECTED, FAILED, LEFT_OUT, NOT_RUN, PASSED, SKIPPED, UNEXPECTED, Outcome, Report, clipped
from .rendering import lines
from .reproduction import Reproduction

if TYPE_CHECKING:
    from ..kit import Effort, Kit

PROFILE = "HAL_PROFILE"


def borne(mark: pytest.Mark) -> set[int]:
    """Return the guarantee that a test with this mark checks, and its additional ones."""
    return {int(mark.args[0]), *mark.args[3]}


def bears(item: pytest.Item) -> set[int]:
    """Return the same of an item; none if it is no test of the kit."""
    mark = item.get_closest_marker("guarantee")
    return borne(mark) if mark else set()


def chosen(text: str) -> set[int]:
    """Return the numbers in "G3,G15-G18". Raises :class:`InvalidValue` for anything else."""
    numbers = set[int]()
    for part in filter(None, re.split(r"[\s,]+", text)):
        match = re.fullmatch(r"[Gg]?0*(\d+)(?:-[Gg]?0*(\d+))?", part)
        found = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not found or not BY_NUMBER.keys() >= {*found}:
            cure = f"G1 to G{len(GUARANTEES)}, separated by commas, or a range such as G18-G25"
            raise InvalidValue(f"{part!r} is not a guarantee", cure=cure, argument="only")
        numbers.update(found)
    return numbers


def leave_out(names: Iterable[str], items: Sequence[pytest.Item]) -> None:
    """Have tests skipped by name. Raises :class:`InvalidValue` for one that does not exist."""
    for name in names:
        found = [item for item in items if name in (item.name, item.name.partition("[")[0])]
        if not found:
            close = difflib.get_close_matches(name, {item.name for item in items}, 1)
            cure = f"did you mean {close[0]}?" if close else "remove it, or correct the name"
            raise InvalidValue(f"{name!r} is not a test of the kit", cure=cure, argument="skip")
        for item in found:
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT))


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
    """Collects the outcomes of a session of pytest into ``findings``."""

    def __init__(self, config: pytest.Config, findings: Findings) -> None:
        self.config, self.findings, self.reproduction = config, findings, Reproduction(config)
        self.kit: Kit | None = None
        self.report: Report | None = None
        self._shown = any(one.outcome == FAILED for one in findings.outcomes.values())
        findings.reproduce = findings.reproduce or self.reproduction.line(None)

    def await_all(self, items: Iterable[pytest.Item], number: Callable[[pytest.Item], int]) -> None:
        """Record the chosen tests, so that those not reached are reported as not run."""
        for item in items:
            self.findings.outcomes.setdefault(item.nodeid, Outcome(item.name, number(item)))

    def is_over(self, item: pytest.Item) -> bool:
        """Return True of a test that an earlier process of this run has judged."""
        return self.outcome_of(item.nodeid) != NOT_RUN

    def failed(self, item: pytest.Item) -> bool:
        """Return True if the test's call has failed, expected or not."""
        return self.outcome_of(item.nodeid) in (FAILED, EXPECTED)

    def note(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, number: int) -> None:
        """Record one phase of a test. The worst phase counts."""
        findings, name = self.findings, item.name.partition("[")[0]
        entry = findings.outcomes.setdefault(item.nodeid, Outcome(item.name, number))
        entry.seconds += call.duration
        if report.skipped:
            entry.outcome = NOT_RUN if findings.unfinished else SKIPPED
            entry.reason = call.excinfo.value.msg if call.excinfo else ""  # type: ignore[attr-defined]
        elif report.failed:
            self._note_failure(entry, call, report)
        elif report.when == "call" and entry.outcome == NOT_RUN:
            entry.outcome = PASSED
            if name in findings.expected:
                entry.outcome, entry.reason = UNEXPECTED, findings.expected[name]

    def _note_failure(self, entry: Outcome, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        assert call.excinfo is not None
        error = call.excinfo.value
        cause = cause_of(error, entry.test.partition("[")[2].removesuffix("]"))
        reproduce = self.reproduction.line(self.kit, f"G{entry.guarantee}")
        self.findings.failed(entry, _kind(error), message_of(error), cause, reproduce)
        if entry.outcome == EXPECTED:
            report.outcome, report.wasxfail = "skipped", entry.reason
        elif entry.same_as:
            report.longrepr, report.sections = f"of the same cause as {entry.same_as}: {entry.kind}", []
        else:
            report.sections.append(("reproduce with", entry.reproduce))

    def outcome_of(self, nodeid: str) -> str:
        """Return how a test has ended."""
        found = self.findings.outcomes.get(nodeid)
        return found.outcome if found is not None else NOT_RUN

    def first_failure(self, nodeid: str) -> list[str]:
        """Return what to print of a test that is the first to fail; [] for every other test."""
        if self._shown or self.outcome_of(nodeid) != FAILED:
            return []
        self._shown = True
        return first_lines(self.findings.outcomes[nodeid])

    def finish(self, status: int | pytest.ExitCode) -> bool:
        """Make and write the report; return true if it must fail the session."""
        self.findings.end(status)
        self.report = self.findings.write(self.config.getoption("--hal-report"))
        return not self.report.ok

    def opened(self, kit: Kit) -> None:
        """Record the device under test, once it is open."""
        self.kit, support = kit, kit.subject.support
        self.reproduction.opened(kit.device.name, kit.capabilities.substituted)
        abilities = {f.name: getattr(kit.capabilities, f.name) for f in fields(kit.capabilities)}
        self.findings.expected = dict(support.expected_failures)
        self.findings.reproduce = self.reproduction.line(kit)
        self.findings.device = {
            "device": kit.bound.name,
            "origin": kit.subject.origin,
            "runtime": dict(support.versions(kit.device)),
            "policy": type(kit.bound.policy).__qualname__,
            "capabilities": {name: value for name, value in abilities.items() if name != "fallbacks"},
            "fallbacks": dict(kit.capabilities.fallbacks),
            "effort": asdict(kit.effort),
        }
        found = self.findings
        found.tell(device=found.device, expected=found.expected, reproduce=found.reproduce)

    def summarize(self, write: Callable[[str], None]) -> None:
        """Print the report as text."""
        if self.report is not None and self.findings.device:
            for line in lines(self.report):
                write(line)


def first_lines(found: Outcome) -> list[str]:
    """Return the lines about the first failure of a run."""
    message, _, trace = found.error.partition("\nTraceback ")
    place = [line.strip() for line in trace.splitlines() if line.startswith("  File ")][-1:]
    text = [clipped(line) for line in (*message.splitlines()[:3], *place)]
    return [f"first failure: G{found.guarantee} {found.test}: {found.kind}", *(f"    {line}" for line in text)]


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
