"""A run whose cases have a process of their own: one that crashes, hangs or exits is a failed case, and the rest goes
on in another process. The report is made here, whatever becomes of them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any

import pytest

from ..harness import properties
from ..harness.claims import Claim
from ..kit import HANG
from . import apart as process
from .findings import Findings
from .key import FINDINGS
from .options import Options, arguments
from .outcomes import EXPECTED, FAILED, NOT_RUN, PRIMITIVES, Outcome
from .rendering import render, wrapped
from .report import first_lines

HANGS = 30
"""How many times ``--hang`` a case may go on without progress, which is the end of an example or of a phase."""
STARTING = 300.0
"""The least number of seconds for the start, up to the first case."""
MOST = 30
"""Cases that may end their process before a run stops, those not counted that the plugin expects to fail."""
INTERRUPTED = int(pytest.ExitCode.INTERRUPTED)


class Teller:
    """The pytest plugin of the cases' process: it sends the recorder's findings; the parent reports."""

    def __init__(self, say: process.Say, findings: Findings) -> None:
        self._say, self._findings, self._spoke = say, findings, 0.0
        self._claims, self.why = 0, ""
        """Why the device was not opened."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Give the run the recorder's findings."""
        self._config = config
        config.stash[FINDINGS], self._findings.tell = self._findings, self._say
        properties.PROGRESS[:] = [self._progress]

    def _progress(self) -> None:
        if monotonic() > self._spoke + 1.0:
            self._spoke = monotonic()
            self._say()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep an error of collection."""
        if report.failed:
            lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self._findings.problems.append(" ".join([f"{report.nodeid} was not collected:", *lines[-1:]]))

    def pytest_runtestloop(self) -> None:
        """Send the names of the collected tests."""
        chosen = [(node, one.test, one.guarantee) for node, one in self._findings.outcomes.items()]
        self._say(chosen=chosen, present=sorted(self._findings.present), only=sorted(self._findings.only))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Send that a test begins. Its failure is left to the report, which has each once."""
        if process.CAME:  # the test before took the interrupt for a failure of its subject
            raise KeyboardInterrupt
        self._config.option.tbstyle = "no"
        self._say(doing=nodeid)

    def pytest_runtest_logreport(self) -> None:
        """A phase of a test is over."""
        self._progress()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Send how it ended."""
        entry = self._findings.outcomes.get(nodeid)
        if len(self._findings.claims) > self._claims:
            self._claims = len(self._findings.claims)
            self._say(claims=[asdict(claim) for claim in self._findings.claims])
        self._say(doing="", ended=nodeid, outcome=entry and asdict(entry))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remove pytest's own reporter, which would print a banner. It stays where pytest stops by itself: only it
        prints errors of collection."""
        if excinfo.errisinstance(pytest.Session.Interrupted):
            return
        self.why = "" if excinfo.errisinstance(KeyboardInterrupt) else str(excinfo.value)
        if (reporter := self._config.pluginmanager.get_plugin("terminalreporter")) is not None:
            self._config.pluginmanager.unregister(reporter)


class Supervisor:
    """Runs the kit. ``prepare``: called in each process first; it returns the options, or raises what is wrong with
    them. ``came``: see :func:`.apart.apart`."""

    def __init__(
        self,
        options: Options,
        prepare: Callable[[], Options],
        plugins: Sequence[object],
        came: Callable[[], object],
    ) -> None:
        self._options, self._prepare, self._plugins, self._came = options, prepare, plugins, came
        self._limit = HANGS * (options.hang or HANG)
        self._findings = Findings()
        self._case = ""
        self._opened = self._interrupted = False
        self._status, self._ends = 0, 0

    def run(self) -> int:
        """Run all cases, print and write the report; return the exit status."""
        while True:
            self._case, self._opened = "", False
            ended = process.apart(self._work, self._hear, self._patience, self._signal)
            if ended.result is not None:
                self._status = ended.result.pop("status")
                vars(self._findings).update(ended.result)
            if self._signal() or ended.result is not None or not self._goes_on(ended):
                break
        found, write = self._findings, None if self._options.json else _print
        found.unfinished = "interrupted" if self._interrupted else found.unfinished
        report = found.write(self._options.targets, write)
        if found.unfinished == "interrupted":
            self._status = INTERRUPTED
            if not found.outcomes:
                raise KeyboardInterrupt
        if self._options.json:
            print(render(report, "json"))
        for problem in () if found.device else report.problems:
            line, _, trace = problem.partition("\n")
            print(*filter(None, [trace]), f"hal conform: error: {line}", sep="\n", file=sys.stderr)
        return 0 if report.ok else self._status or 1

    def _patience(self) -> float:
        """Return the seconds that may pass without progress: to import and open takes long on a busy machine."""
        return self._limit if self._opened and self._case else max(self._limit, STARTING)

    def _signal(self) -> bool:
        """Return True once a signal has come. The report is written at once, in case that the next one ends this
        process."""
        if self._came() and not self._interrupted:
            self._interrupted, self._findings.unfinished = True, "interrupted"
            self._findings.write(self._options.targets)
        return self._interrupted

    def _work(self, say: process.Say) -> dict[str, Any]:
        """In the cases' process: run pytest; return the further findings, and its status."""
        options = self._prepare()
        if self._findings.device:  # a drawn one
            options = options.but(seed=self._findings.device["effort"]["seed"])
        if options.json:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drivers write there too
        teller, found = Teller(say, self._findings), self._findings
        given = [*arguments(options), "--tb=short", "-qq", "-rN"]
        status = pytest.main(given, plugins=[teller, *self._plugins])
        found.problems += filter(None, [teller.why])
        found.end(status)
        kept = {name: getattr(found, name) for name in ("problems", "unfinished", "stopped", "reproduce")}
        return {"status": int(status), **kept}

    def _hear(self, message: dict[str, Any]) -> None:
        """Take a message of the cases' process."""
        found = self._findings
        self._case = message.get("doing", self._case)
        for node, test, number in message.get("chosen", ()):
            found.outcomes.setdefault(node, Outcome(test, number))
        if "present" in message:
            found.present, found.only = set(message["present"]), set(message["only"])
        if "device" in message:
            self._opened = True
            found.device = message["device"] | {"limit": self._limit}
            found.expected, found.reproduce = message["expected"], message["reproduce"]
        if message.get("outcome"):
            found.outcomes[message["ended"]] = Outcome(**message["outcome"])
        found.claims.update(dict.fromkeys(Claim(**claim) for claim in message.get("claims", ())))

    def _goes_on(self, ended: process.Ending) -> bool:
        """Record the case that ended its process; return True if another one is to run the rest."""
        found = self._findings
        entry = found.outcomes.get(self._case)
        if entry is None or not self._opened:
            begun = any(one.outcome != NOT_RUN for one in found.outcomes.values())
            where = "outside of a test" if begun else "before the first test"
            where = f"while {self._case.rpartition('::')[2]} opened the device" if self._case else where
            found.problems.append("\n".join(filter(None, [f"{ended.why}, {where}", ended.trace])))
            return False
        error = f"{ended.why}, in this test"
        if ended.trace:
            error += f"\nTraceback (most recent call last):\n{ended.trace}"
        first = not any(one.outcome == FAILED for one in found.outcomes.values())
        reproduce = f"{found.reproduce} --only G{entry.guarantee}"
        place = ended.trace.rpartition("\n")[2].strip()
        found.failed(entry, "hang" if ended.late else "crash", error, f"{ended.why} at {place}", reproduce)
        shown = first_lines(entry) if first and entry.outcome == FAILED else [f"{entry.test}: {ended.why}"]
        if not self._options.json:
            print("", *shown, sep="\n", flush=True)
        self._ends += entry.outcome != EXPECTED
        if "test_primitives" in self._case and entry.outcome == FAILED:
            found.stopped = PRIMITIVES
        elif self._ends == MOST:
            found.stopped = f"{MOST} tests have ended their process: mend them first"
        return not found.stopped and any(one.outcome == NOT_RUN for one in found.outcomes.values())


def _print(line: str) -> None:
    print(wrapped(line, shutil.get_terminal_size().columns) if sys.stdout.isatty() else line)
