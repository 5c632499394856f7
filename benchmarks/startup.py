"""Start of the ``hal`` command against an older tree in turn, and the time until something shows in a terminal.

    git worktree add ../old 66edf50 && python benchmarks/startup.py --old ../old [--rounds 20] [--whole]

``--whole``: in place of starts, whole runs of eight prompts, in one process and by ``--tp 2``.

Medians of each process's user and system time, with its children's, in milliseconds; of whole runs also of the elapsed
time. A round runs the old tree, the new one and the old one:
half the difference of the old ones is the error. Both trees run in this environment, with the newer one's metadata;
``HAL_PLUGINS=paddle-hal-core`` has ``hal devices`` import no plugin but the core's. The last line is the elapsed time
from the start of ``hal run`` in a terminal to its first byte there.
"""

from __future__ import annotations

import argparse
import os
import pty
import statistics
import subprocess
import sys
import time
from pathlib import Path

MAIN = "from hal.cli import main; main()"
COMMANDS = {"hal --help": ["--help"], "hal devices": ["devices"]}
_PROMPTS = [text for at in range(8) for text in ("--prompt", f"def f{at}(")]
_RUN = ["run", "--device", "cpu", "--temperature", "0", "--max-tokens", "200", "--slots", "8", *_PROMPTS]
RUNS = {"hal run": _RUN, "hal run --tp 2": [*_RUN, "--tp", "2"]}


def times_ms(tree: Path, arguments: list[str]) -> tuple[float, float]:
    """Processor time and elapsed time of one command."""
    paths = [tree, *sorted(tree.glob("*/src")), *sorted(tree.glob("*/*/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HAL_PLUGINS": "paddle-hal-core"}
    command = [sys.executable, "-P", "-c", MAIN, *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{tree}: hal {' '.join(arguments)} failed"
    return 1000 * (used.ru_utime + used.ru_stime), 1000 * (time.perf_counter() - began)


def first_byte_ms() -> float:
    """Elapsed time until ``hal run`` shows something in a terminal; the command is ended then."""
    ours, theirs = pty.openpty()
    began = time.perf_counter()
    command = [sys.executable, "-c", MAIN, "run", "x", "--device", "cpu"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as run:
        os.read(ours, 1)
        taken = time.perf_counter() - began
        run.kill()
    os.close(ours)
    os.close(theirs)
    return 1000 * taken


def _row(turns: list[list[float]]) -> str:
    """Return the columns of a table for times of the old tree, the new one and the old one."""
    middle = [statistics.median(column) for column in zip(*turns, strict=True)]
    more = statistics.median(new - (first + last) / 2 for first, new, last in turns)
    error = statistics.median(abs(last - first) / 2 for first, _, last in turns)
    return f"{(middle[0] + middle[2]) / 2:.0f} | {middle[1]:.0f} | {more:+.0f} | {error:.0f} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--whole", dest="runs", action="store_true", help="compare whole runs")
    chosen = parser.parse_args()
    old, new = chosen.old.resolve(), Path(__file__).resolve().parents[1]
    print("| command | old, ms | new, ms | new less old | error |\n|---|---:|---:|---:|---:|")
    for name, arguments in (RUNS if chosen.runs else COMMANDS).items():
        turns = [[times_ms(tree, arguments) for tree in (old, new, old)] for _ in range(chosen.rounds)]
        for at, what in enumerate(("", ", elapsed") if chosen.runs else ("",)):
            print(f"| {name}{what} | {_row([[one[at] for one in turn] for turn in turns])}", flush=True)
    if chosen.runs:
        return
    shown = sorted(first_byte_ms() for _ in range(chosen.rounds))
    print(f"first byte in a terminal: {statistics.median(shown):.0f} ms ({shown[0]:.0f} to {shown[-1]:.0f})")


if __name__ == "__main__":
    main()
