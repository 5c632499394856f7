"""Run tests and write the table of the slowest ones: seconds, seconds of processor time, processes started.

    make slowest                                        every test of `make test`, into docs/evidence/slowest-tests.md
    python tools/slowest.py --table FILE -- tests/output        what comes after -- is for pytest

Processor time is that of the process which runs the tests and of the processes that it has waited for. Where the
machine does other things too it says more than seconds do. Of a virtual machine whose cores are another's as well, it
says too much: so a short loop is timed now and then, and the table tells how many times its least time it took.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "evidence" / "slowest-tests.md"
ROWS = 50
LIBRARIES = ("pytest", "pytest-xdist", "hypothesis", "numpy", "paddlepaddle")
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")


@dataclass
class Cost:
    """Of one test, its fixtures included, or of a file."""

    seconds: float = 0.0
    cpu: float = 0.0
    started: int = 0

    def add(self, seconds: float, cpu: float, started: int) -> None:
        """What one phase took."""
        self.seconds, self.cpu, self.started = self.seconds + seconds, self.cpu + cpu, self.started + started


def _cpu() -> float:
    """Seconds of processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Pace:
    """How fast the cores were: processor time of a short loop, every two seconds, in a thread."""

    def __init__(self) -> None:
        self._took: list[float] = []
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="pace", daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(2.0):
            began = time.thread_time()
            for _ in range(100_000):
                pass
            self._took.append(time.thread_time() - began)

    def told(self) -> str:
        """In a sentence, for the table; the last one."""
        self._ended.set()
        if not self._took:
            return "It was too short to say how fast the cores were."
        times = sum(self._took) / len(self._took) / min(self._took)
        return f"A short loop took {times:.2f} times its least processor time, on average of {len(self._took)}."


class Meter:
    """The pytest plugin, in the process that reports and in the workers. With workers it measures there."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._began, self._cpu, self._started, self._seen = time.monotonic(), _cpu(), 0, 0
        self._costs: dict[str, Cost] = {}
        self._before: list[float] = []
        self._after = 0.0
        self._pace: Pace | None = None
        sys.addaudithook(self._audit)

    def _audit(self, event: str, _: object) -> None:
        self._started += event in STARTS

    def _lap(self) -> tuple[float, int]:
        """Processor time and processes since the last lap."""
        cpu, started = _cpu(), self._started
        found = cpu - self._cpu, started - self._seen
        self._cpu, self._seen = cpu, started
        return found

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Where it is told, look how fast the cores are."""
        if not hasattr(session.config, "workeroutput"):
            self._pace = Pace()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Everything is imported."""
        cpu, _ = self._lap()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["before"] = cpu
        elif not self._workers(session.config):
            self._before.append(cpu)

    @staticmethod
    def _workers(config: pytest.Config) -> bool:
        return bool(config.pluginmanager.has_plugin("dsession"))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """A worker has ended: what its imports took, and the processes that its files shared."""
        told = getattr(node, "workeroutput", {})
        self._before.append(told.get("before", 0.0))
        self._after += told.get("after", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A phase has ended, here."""
        report = yield
        report.user_properties.append(("cost", self._lap()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The same, told to the process that reports."""
        for name, value in report.user_properties:
            if name == "cost":
                cpu, started = cast(tuple[float, int], value)
                self._costs.setdefault(report.nodeid, Cost()).add(report.duration, cpu, started)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the table."""
        cpu, _ = self._lap()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["after"] = cpu
        else:
            self._after += 0.0 if self._workers(session.config) else cpu
            lines = self._lines(session.config, int(exitstatus))
            self._table.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _lines(self, config: pytest.Config, status: int) -> Iterable[str]:
        processes = len(self._before)
        files: dict[str, Cost] = {}
        for name, cost in self._costs.items():
            files.setdefault(name.partition("::")[0], Cost()).add(cost.seconds, cost.cpu, cost.started)
        total = sum(cost.cpu for cost in self._costs.values()) + sum(self._before) + self._after
        libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        yield f"# The {ROWS} slowest tests"
        yield ""
        arguments = " ".join(map(str, config.invocation_params.args)).replace(f"{ROOT}/", "")
        yield f"Made by `make slowest` (`pytest {arguments}`),"
        yield f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} over five"
        yield f"minutes at the end, Python {platform.python_version()}, {libraries}."
        yield ""
        yield f"{len(self._costs)} tests in {time.monotonic() - self._began:.0f} s, status {status}; {total:.0f} s of"
        yield f"processor time, {sum(self._before):.0f} of them for imports and collection in {processes} process(es)"
        yield f"before the first test, {self._after:.0f} for processes that files share. Fixtures count for the test"
        yield "that first asks for them, and a process for the test that waits for its end."
        if self._pace is not None:
            yield self._pace.told()
        yield ""
        yield from _rows("test", self._costs)
        yield ""
        yield "## Files"
        yield ""
        yield from _rows("file", files)


def _rows(kind: str, costs: dict[str, Cost]) -> Iterable[str]:
    yield f"| {kind} | seconds | processor | processes |"
    yield "|---|---:|---:|---:|"
    for name, cost in sorted(costs.items(), key=lambda pair: -pair[1].seconds)[:ROWS]:
        shown = name.replace("|", "\\|")
        yield f"| `{shown}` | {cost.seconds:.1f} | {cost.cpu:.1f} | {cost.started} |"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the plugin."""
    parser.addoption("--slowest-table", type=Path, help="write the table of the slowest tests here")


def pytest_configure(config: pytest.Config) -> None:
    """Measure, if there is a table to write."""
    table = config.getoption("--slowest-table")
    if table is not None:
        config.pluginmanager.register(Meter(table.absolute()), "hal-slowest")


def main(given: Sequence[str] | None = None) -> int:
    """The command; pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to write")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    chosen = parser.parse_args(given)
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-p", "slowest", f"--slowest-table={chosen.table.absolute()}"]
    done = subprocess.run([*command, *chosen.pytest], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
