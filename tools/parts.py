"""Run named parts of the checks, some concurrently, and print how long each took.

    python tools/parts.py conform                what `make conform` runs, three at a time
    python tools/parts.py conform sim matrix     the parts whose name contains one of these words
    python tools/parts.py ci --list              names and commands, without running anything

Prints elapsed time, and processor time, which a busy machine does not change. A part that fails prints all of its
output; the remaining parts continue, unless it runs alone. One that cannot run on this machine (exit status 77) is
skipped, with its reason. At the limit, running parts are named and ended; the status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
BIN, OLDER = ".venv/bin/", ".venv-older/bin/"
ENDING = 20.0
"""Seconds for a part to report what it was doing, and to end its children, before it is killed."""
SKIPPED = 77
"""Exit status of a part that cannot run on this machine, as with automake; its last line is the reason."""


@dataclass(frozen=True)
class Part:
    """A command with a name, and variables beside those of this process.

    ``alone``: it runs without any other part, prints as it goes, and later parts do not begin if it fails.
    ``prints``: what it prints is shown also if it goes well.
    """

    name: str
    command: str
    variables: str = ""
    alone: bool = False
    prints: bool = False

    @property
    def told(self) -> str:
        """The command as a shell takes it."""
        return f"{self.variables} {self.command}".strip()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the process."""
        return os.environ | dict(one.split("=", 1) for one in self.variables.split())


@dataclass(frozen=True)
class Plan:
    """Parts, how many run at a time, and the seconds after which all must have ended (0: any).

    One more than two cores: half of a run of the kit on an asynchronous device is waiting.
    """

    parts: tuple[Part, ...]
    beside: int = 3
    limit: float = 0.0

    def stages(self, parts: Sequence[Part]) -> Iterable[list[Part]]:
        """Those of ``parts`` that may run beside each other, in their order; one that runs alone is a stage."""
        for _, stage in groupby(enumerate(parts), lambda pair: pair[0] if pair[1].alone else -1):
            yield [part for _, part in stage]


def kit(name: str, device: str, profile: str, variables: str = "", python: str = BIN) -> Part:
    """One whole run of the kit."""
    return Part(f"kit: {name}", f"{python}hal conform {device} --profile {profile}", variables)


def kit_sim(name: str, mode: int, profile: str, python: str = BIN) -> Part:
    """One on sim. Pageable memory is read when a copy runs, and the happens-before checker looks on."""
    options = f"-q --no-header -p no:cacheprovider -p hal_sim.pytest_races --hal-device=sim --hal-profile={profile}"
    command = f"{python}python -m pytest {options} --pyargs hal_conformance"
    return Part(f"kit: {name}", command, f"HALSIM_MODE={mode} HALSIM_STAGED=0")


KITS = "conformance/tests core/tests plugins runners"
LIARS, OVERLAP = "conformance/tests/test_liars.py", "tests/overlap"
ON_RAY = "tests/distributed/test_ray.py"
DRAWN = "'(hypothesis or drawn) and not conform'"
CONFORM = (
    Part(
        "the suite's own runs of the kit",
        f"{BIN}python -m pytest -q -m conform --deselect {LIARS} {KITS}",
        "HAL_TEST_SHARE=1",
    ),
    Part(
        "the suite's whole jobs",
        f"{BIN}python -m pytest -q -m conform --ignore {OVERLAP} --ignore {ON_RAY} tests",
        "HAL_TEST_SHARE=1",
    ),
    # one fixture runs all
    Part("liars", f"{BIN}python -m pytest -q -s -m conform -o faulthandler_timeout=3600 {LIARS}", prints=True),
    Part("overlap, a thousand schedules", f"{BIN}python -m pytest -q -m conform {OVERLAP}"),
    kit_sim("sim, lazy", 2, "default"),
    kit("cpu", "cpu", "default"),
    Part("properties, all examples", f"{BIN}python -m pytest -q -m {DRAWN}", "HAL_TEST_SHARE=1"),
    Part("ranks on Ray", f"{BIN}python -m pytest -q -m conform {ON_RAY}"),
    Part("matrix, every pair", f"{BIN}python -m tests.matrix --pairwise"),
)
NIGHTLY = (
    Part("mutants of the core", "make mutants"),
    kit("cpu", "cpu", "nightly"),
    kit_sim("sim, eager", 0, "nightly"),
    kit_sim("sim, worker", 1, "nightly"),
    kit_sim("sim, lazy", 2, "nightly"),
    kit("maca over sim", "maca", "default", "HAL_MACA_PLACE=sim HALSIM_MODE=2 HALSIM_STAGED=0"),
    kit("xpu over sim", "xpu", "default", "HAL_XPU_PLACE=sim"),
    kit("xpu over cpu", "xpu", "default", "HAL_XPU_PLACE=cpu"),
    kit("cpu, older Paddle", "cpu", "default", python=OLDER),
    kit_sim("sim, lazy, older Paddle", 2, "default", OLDER),
)
OLDER_CPU = Part("hal run on older CPUs", f"{BIN}python tools/older_cpu.py")
PYTHONS = tuple(
    Part(f"the first hour on Python {version}", f"{BIN}python tools/pythons.py {version}")
    for version in ("3.11", "3.12", "3.13")
)
NO_COMPILER = Part("tests without a compiler", f"{BIN}python tools/no_compiler.py")
RAY = Part("Ray itself", "make .venv/.ray", alone=True)
"""Runs alone, because it reinstalls hal. Without it the tests of ranks on Ray are skipped by name."""
CI = (Part("make test", "make test", alone=True), RAY, *CONFORM, NO_COMPILER, OLDER_CPU, *PYTHONS)
PLANS = {
    "conform": Plan(CONFORM),
    "nightly": Plan(NIGHTLY),
    "ci": Plan(CI, limit=85 * 60),
}


@dataclass
class Runner:
    """One run of a plan."""

    plan: Plan
    began: float = field(default_factory=time.monotonic)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    over: str = ""
    rows: list[str] = field(default_factory=list)
    _stopped: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, parts: Sequence[Part]) -> int:
        """Run them; return 0 if all succeeded. SIGTERM ends all, and names the running ones."""
        limit = threading.Timer(self.plan.limit, self.end, [f"the limit of {self.plan.limit:.0f} s is over"])
        limit.daemon = True
        if self.plan.limit:
            limit.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._aside("ended by a signal"))
        for stage in self.plan.stages(parts):
            with ThreadPoolExecutor(self.plan.beside) as pool:
                for done in [pool.submit(self._part, part) for part in stage]:
                    done.result()
        limit.cancel()
        bad = f"failed: {', '.join(self.failed)}" if self.failed else "all went well"
        tell(f"{len(parts)} parts in {self._seconds():.0f} s, {bad}")
        return 1 if self.failed else 0

    def _aside(self, why: str) -> None:
        """End everything from another thread: a handler runs where a lock may be held."""
        threading.Thread(target=self.end, args=[why]).start()

    def end(self, why: str) -> None:
        """Name and end the running parts; the remaining ones do not begin."""
        with self._lock:
            self.over, found = why, dict(self.running)
        for name, process in found.items():
            tell(f"{name}: {why}, and it still runs")
            _signal(process, signal.SIGTERM)
        end = time.monotonic() + ENDING
        while time.monotonic() < end and any(process.returncode is None for process in found.values()):
            time.sleep(0.1)
        for process in found.values():
            if process.returncode is None:
                _signal(process, signal.SIGKILL)

    def _seconds(self) -> float:
        return time.monotonic() - self.began

    def _part(self, part: Part) -> None:
        with tempfile.TemporaryFile() as output:
            began = self._seconds()
            with self._lock:
                why = self.over or self._stopped
                if why:
                    self.failed.append(part.name)
                    tell(f"{part.name}: not begun, since {why}")
                    return
                try:
                    process = self.running[part.name] = self._start(part, output)
                except OSError as error:
                    self.failed.append(part.name)
                    tell(f"{part.name}: FAILED, it did not begin: {error}: {part.told}")
                    return
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            with self._lock:
                del self.running[part.name]
            told = f"{self._seconds() - began:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} s of processor time"
            if self.over:
                _signal(process, signal.SIGKILL)  # what its end has left behind
            output.seek(0)
            text = output.read().decode(errors="replace").rstrip()
            if process.returncode == SKIPPED and not (self.over or part.alone):
                why = text.rpartition("\n")[2]
                self.rows.append(f"| {part.name} | skipped | {why} | `{part.told}` |")
                tell(f"{part.name}: skipped, {why}")
                return
            bad = bool(process.returncode or self.over)
            self.rows.append(f"| {part.name} | {'FAILED' if bad else 'well'} | {told} | `{part.told}` |")
            if bad:
                self.failed.append(part.name)
                self._stopped = f"{part.name} failed" if part.alone else self._stopped
                tell(f"{part.name}: FAILED with {process.returncode}, {told}: {part.told}\n{text}".rstrip())
            else:
                tell(f"{part.name}: well, {told}" + (f"\n{text}" if part.prints else ""))

    def _start(self, part: Part, output: IO[bytes]) -> subprocess.Popen[bytes]:
        """In a session of its own, so that its children are ended with it."""
        tell(f"{part.name}: begins, {self._seconds():.0f} s after the beginning")
        return subprocess.Popen(
            shlex.split(part.command),
            cwd=ROOT,
            env=part.environment,
            stdin=subprocess.DEVNULL,
            stdout=None if part.alone else output,
            stderr=None if part.alone else subprocess.STDOUT,
            start_new_session=True,
        )


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the process and all that it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def tell(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("words", nargs="*", help="only parts whose name contains one of them")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write down what each part took, and when")
    parser.add_argument("--list", action="store_true", help="print names and commands, run nothing")
    chosen = parser.parse_args(given)
    plan = PLANS[chosen.plan]
    parts = [one for one in plan.parts if not chosen.words or any(word in one.name for word in chosen.words)]
    if not parts:
        parser.error(f"no part has one of {chosen.words} in its name (--list names them)")
    if chosen.list:
        print("\n".join(f"{part.name:<40} {part.told}" for part in parts))
        return 0
    runner, began = Runner(plan), datetime.now(UTC)
    status = runner.run(parts)
    if chosen.record:
        chosen.record.write_text("\n".join(record(chosen.plan, runner, began)) + "\n", encoding="utf-8")
    return status


def record(plan: str, runner: Runner, began: datetime) -> Iterable[str]:
    """The page about a run."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    yield f"# The last run of `make {plan}`"
    yield ""
    yield f"Begun {began:%Y-%m-%d %H:%M} UTC on {os.cpu_count()} cores, {platform.platform()}, Python"
    yield f"{platform.python_version()}, at commit {commit.stdout.strip() or 'unknown'}. Written by that command."
    yield ""
    yield "| part | result | took | command |"
    yield "|---|---|---|---|"
    yield from runner.rows
    told = " ".join(runner.rows)
    yield from (f"| {name} | not begun | | |" for name in runner.failed if f"| {name} |" not in told)


if __name__ == "__main__":
    sys.exit(main())
