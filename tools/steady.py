"""Run the test files that use processes, threads or deadlines many times, beside busy processes, and count what fails.

    python tools/steady.py                       ten times, beside one busy process a core
    python tools/steady.py --times 3 --busy 0 tests/output
    python tools/steady.py --list                the files, without running anything

A test that depends on which thread is faster passes on a quiet machine and fails on a user's. Prints a line a round
and, last, each test that failed with how often; the status is 1 if any did.

A round runs those files as `make test` does, and their tests marked `steady`, as many files at a time as there are
cores. Of the whole runs of the kit it has the one on sim alone, whose streams are threads: the remaining ones differ in
how bytes move, not in how threads wait.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests", "core/tests", "plugins", "runners")
SENSITIVE = re.compile(r"subprocess|RankPool|multiprocessing|os\.fork|signal\.SIG|monotonic\(|threading\.|\btimeout\b")
"""Patterns of a file that starts processes or threads, or depends on deadlines."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
BUSY = "while True: pass"
CHOSEN = "not whole_kit and (not conform or steady)"
"""The marked tests that a round has."""


def beside(files: int) -> list[str]:
    """Options for pytest: files beside each other, where there are several of both files and cores."""
    workers = min(files, os.cpu_count() or 1)
    return (
        ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
        if workers > 1
        else []
    )


def sensitive_files(folders: Sequence[str] = FOLDERS) -> list[Path]:
    """The test files below ``folders``, relative to the repository, whose own text or helpers match SENSITIVE."""
    found = []
    for folder in folders:
        place = ROOT / folder
        for file in [place] if place.is_file() else sorted(place.rglob("test_*.py")):
            helpers = [] if place.is_file() else [file.with_name("conftest.py")]
            texts = [one.read_text() for one in (file, *helpers) if one.exists()]
            if "src" not in file.parts and any(SENSITIVE.search(text) for text in texts):
                found.append(file.relative_to(ROOT))
    return found


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that only take processor time, ended with the context and with this process."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="rounds (10)")
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="busy processes (one a core)")
    parser.add_argument("--list", action="store_true", help="print the files and stop")
    parser.add_argument("places", nargs="*", default=FOLDERS, help="files or folders (all)")
    options = parser.parse_args(arguments)
    files = [str(file) for file in sensitive_files(options.places)]
    if options.list or not files:
        print("\n".join(files) or f"no such file below {' '.join(options.places)}")
        return 0 if files else 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the round that runs, and the busy processes
    together = beside(len(files))
    failures: Counter[str] = Counter()
    broken = 0
    with busy(options.busy):
        for round_ in range(1, options.times + 1):
            began = time.monotonic()
            run = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "--no-header",
                    "-p",
                    "no:cacheprovider",
                    "-m",
                    CHOSEN,
                    *together,
                    *files,
                ],
                cwd=ROOT,
                text=True,
                capture_output=True,
                check=False,
            )
            failed = FAILED.findall(run.stdout)
            failures.update(failed)
            broken += run.returncode not in (0, 1) or (run.returncode == 1 and not failed)
            last = (run.stdout.strip().splitlines() or [run.stderr.strip()])[-1]
            print(f"round {round_} of {options.times}, {time.monotonic() - began:.0f} s: {last}", flush=True)
            if run.returncode:
                print(run.stdout[-20000:], file=sys.stderr)
    for name, count in failures.most_common():
        print(f"{count:3d} x {name}")
    good = not failures and not broken
    print(f"{len(files)} files, {options.times} rounds beside {options.busy} busy processes: ", end="")
    print("no failure" if good else f"{sum(failures.values())} failures of {len(failures)} tests, {broken} broken runs")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
