"""Remove each guard of the core in turn, in a copy, and check that the tests named for it fail.

    python tools/guards.py                 all guards; prints guard | guarantee | killed by; 1 if one survives
    python tools/guards.py --only G8,G11   some; --list names them without running anything

A guard is an exact piece of source, which must occur once, and its replacement. Its tests are tests of the kit
(``test_gNN_…``, run in the quick profile on the device named) or files of unit tests with a name.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard import Guard
from guard_table import GUARDS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("core", "conformance", "examples", "tests", "pyproject.toml", "conftest.py")
PATIENCE = 600
"""Seconds. A run that takes longer hangs, which does not count as a missed guard."""
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


@dataclass(frozen=True)
class Run:
    """One run of pytest: which tests failed, and its exit status and output."""

    failed: tuple[str, ...]
    status: int
    output: str


class Copy:
    """The tree in a temporary folder, from which pytest imports ``hal_core``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=LEFT_OUT)
            else:
                shutil.copy2(source, folder / name)
        places = ("core/src", "conformance/src", "conformance/tests")
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(folder / place) for place in places)}
        self.environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # two versions of a file within a second look alike
        self.environment |= {"HAL_TEST_SHARE": "1"}
        found = self._python("-c", "import hal_core; print(hal_core.__file__)").stdout.strip()
        if not found.startswith(str(folder)):
            raise SystemExit(f"guards: hal_core comes from {found}, not from the copy in {folder}")

    def without(self, guard: Guard) -> Run:
        """Run the guard's tests with the guard removed; it is put back afterwards."""
        path = self.folder / guard.file
        whole = path.read_text(encoding="utf-8")
        path.write_text(whole.replace(guard.fragment, guard.replacement), encoding="utf-8")
        try:
            return self.run(guard.tests, guard.device, guard.guarantee)
        finally:
            path.write_text(whole, encoding="utf-8")

    def run(self, tests: Iterable[str], device: str, guarantees: str) -> Run:
        """Run tests of the kit on a device, or unit tests."""
        tests = sorted(set(tests))
        files = sorted({test.partition("::")[0] for test in tests if "::" in test})
        names = sorted({test.rpartition("::")[2] for test in tests})
        common = ["-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider", "-k", " or ".join(names)]
        if files:
            done = self._python(*common, "--import-mode=importlib", "--hypothesis-profile=unshrunk", *files)
        else:
            kit = self.folder / "conformance/src/hal_conformance"
            chosen = f"--hal-device-factory={device}" if ":" in device else f"--hal-device={device}"
            settings = ["--import-mode=importlib", "-c", str(kit / "conform.ini"), "--rootdir", str(kit), chosen]
            wanted = ["--hal-profile=quick", "--hal-no-shrink", f"--hal-only={guarantees}"]
            done = self._python(*common, *settings, *wanted, "-x", "--pyargs", "hal_conformance")
        failed = re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE)
        return Run(tuple(dict.fromkeys(failed)), done.returncode, done.stdout + done.stderr)

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                out += f"killed after {PATIENCE} s"
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def misplaced(guards: Sequence[Guard]) -> list[str]:
    """Guards that are not in the source exactly once: the table has to follow the code."""
    wrong = []
    for guard in guards:
        found = (ROOT / guard.file).read_text(encoding="utf-8").count(guard.fragment)
        if found != 1:
            wrong.append(f"{guard.name}: its fragment is {found} times in {guard.file}, but must be there once")
    return wrong


def whole(copy: Copy, guards: Sequence[Guard]) -> list[str]:
    """The tests must pass, and be there, with every guard in place."""
    batches: dict[tuple[str, bool], list[Guard]] = defaultdict(list)
    for guard in guards:
        batches[guard.device, "::" in guard.tests[0]].append(guard)
    wrong = []
    for (device, _), batch in batches.items():
        tests = [test for guard in batch for test in guard.tests]
        done = copy.run(tests, device, ",".join(sorted({guard.guarantee for guard in batch})))
        if done.status != 0:
            wrong.append(f"with every guard in place, on {device}: {done.failed or done.output[-800:]}")
    return wrong


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Remove each guard in turn; its tests must fail.")
    parser.add_argument("--only", default="", metavar="G8,G11", help="guards of these guarantees alone")
    parser.add_argument("--list", action="store_true", help="print the table, run nothing")
    chosen = parser.parse_args(given)
    wanted = set(filter(None, chosen.only.upper().split(",")))
    guards = [guard for guard in GUARDS if not wanted or guard.guarantee in wanted]
    wrong = misplaced(guards)
    if wrong:
        print("\n".join(f"guards: {text}" for text in wrong))
        return 1
    if chosen.list:
        print("\n".join(f"{g.name:<46} {g.guarantee:<4} {', '.join(g.tests)}" for g in guards))
        return 0
    with tempfile.TemporaryDirectory(prefix="hal-guards-") as folder:
        return remove_each(Copy(Path(folder)), guards)


def remove_each(copy: Copy, guards: Sequence[Guard]) -> int:
    """Print the table row by row; return 1 if no test fails without some guard."""
    wrong = whole(copy, guards)
    if wrong:
        print("\n".join(f"guards: {text}" for text in wrong))
        return 1
    print(f"{'guard':<46} | {'':<4} | killed by")
    survivors = []
    for guard in guards:
        done = copy.without(guard)
        killed = done.status == 1 and bool(done.failed)
        if not killed:
            survivors.append(guard.name)
        by = ", ".join(done.failed) if killed else f"SURVIVES (pytest ended with {done.status})"
        print(f"{guard.name:<46} | {guard.guarantee:<4} | {by}", flush=True)
    print(f"{len(guards) - len(survivors)} of {len(guards)} guards are missed when they are gone {survivors or ''}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
