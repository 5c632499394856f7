"""Change one line at a time, in a copy, by cosmic-ray: its tests must fail.

    make mutants                                      installs cosmic-ray; 100 mutants of the core drawn by today's date
    python tools/mutants.py --count 30 --seed 7       others; --file rows takes the files whose path contains it
    python tools/mutants.py --of fastdeploy           of FastDeploy's insertion

Prints a row for each: killed by which test, or survives, with the change; status 1 if fewer than ``--share`` die.
A survivor is a test that is missing, or a change without an effect.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "core": [
        f"core/src/hal_core/{name}.py" for name in ("runtime/policy", "slots/checks", "slots/insertion", "output/rows")
    ],
    "fastdeploy": [
        f"adapters/fastdeploy/src/hal_fastdeploy/{name}.py"
        for name in ("batches", "columns", "host", "insertion", "mounting", "reading", "requests", "saving", "values")
    ],
}
KIT = "conformance/src/hal_conformance"
FIRST = ("test_insertion", "test_output_rows", "test_output_ticket", "test_bound", "test_writes", "test_steps")
"""Of core/tests, those that see most of these files. All of them follow after the kit, which finds more."""
PATIENCE = 900
"""Seconds for all tests of a mutant: one that takes longer hangs, and is killed by that."""


def tests(of: str) -> Iterator[list[str]]:
    """pytest's arguments, run by run, the quickest first. The core's: its own, and the quick kit on two devices."""
    common = ["-m", "pytest", "-q", "-x", "--tb=line", "-rf", "-p", "no:cacheprovider", "--import-mode=importlib"]
    own = [*common, "--hypothesis-profile=unshrunk"]
    if of == "fastdeploy":
        yield [*own, "adapters/fastdeploy/tests"]
        return
    yield [*own, *(f"core/tests/{name}.py" for name in FIRST)]
    settings = ["-c", f"{KIT}/conform.ini", "--rootdir", KIT, "--hal-profile=quick", "--hal-no-shrink"]
    for device in ("--hal-device=cpu", "--hal-device-factory=queued_device:queued"):
        yield [*common, *settings, device, "--pyargs", "hal_conformance"]
    yield [*own, "core/tests"]


def command(of: str) -> str:
    """All of them, up to the first that fails."""
    return shlex.join(["sh", "-c", " && ".join(shlex.join([sys.executable, *one]) for one in tests(of))])


def copy(folder: Path) -> None:
    """The tree's files, as git knows them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)


def unevaluated(path: Path) -> list[range]:
    """The lines' columns that are annotations, which nothing evaluates: ``line * 1000 + column``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.expr):
                end = (part.end_lineno or part.lineno) * 1000 + (part.end_col_offset or 0)
                found.append(range(part.lineno * 1000 + part.col_offset, end))
    return found


def drawn(files: Sequence[Path], count: int, seed: int) -> list[Any]:
    """``count`` of cosmic-ray's mutations of these files, in the order in which they were drawn."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    typed = {file: unevaluated(file) for file in files}
    with use_db("session.sqlite", WorkDB.Mode.create) as work:
        init(files, work, {})
        every = [mutation for item in work.work_items for mutation in item.mutations]

    def evaluated(mutation: Any) -> bool:  # noqa: ANN401 (cosmic-ray's)
        at = mutation.start_pos[0] * 1000 + mutation.start_pos[1]
        return not any(at in part for part in typed[mutation.module_path])

    places: dict[tuple[Any, ...], list[Any]] = {}
    for one in sorted(filter(evaluated, every), key=lambda one: (one.module_path, one.start_pos, one.operator_name)):
        kind = one.operator_name.partition("/")[2].partition("_")[0]  # twelve replacements of an operator are one
        places.setdefault((one.module_path, one.start_pos, kind), []).append(one)
    chance = random.Random(seed)
    return [chance.choice(one) for one in chance.sample([*places.values()], min(count, len(places)))]


def run(mutations: Iterable[Any], tests: str) -> tuple[int, int]:
    """Judge each, in the working folder; how many were killed, and how many there are."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import TestOutcome

    killed = every = 0
    for mutation in mutations:
        begin = time.monotonic()
        result = mutate_and_test([mutation], tests, PATIENCE)
        every += 1
        by = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.output or "", re.MULTILINE)
        dead = result.test_outcome is TestOutcome.KILLED
        killed += dead
        why = f"killed by {by[0].rpartition('/')[2] if by else 'an error'}" if dead else "SURVIVES"
        place = f"{mutation.module_path.stem}:{mutation.start_pos[0]}"
        operator = mutation.operator_name.partition("/")[2]
        print(f"{place:<14} {operator:<44} {time.monotonic() - begin:4.0f} s  {why}", flush=True)
        if not dead:
            changed = [line for line in (result.diff or "").splitlines() if re.match(r"[-+](?![-+])", line)]
            print("".join(f"    {line}\n" for line in changed), end="", flush=True)
    return killed, every


def main(given: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=FILES, default="core")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=datetime.now(UTC).toordinal(), help="by default the day's")
    parser.add_argument("--file", default="", metavar="WORD")
    parser.add_argument("--share", type=float, default=0.85, help="killed at least; by default 0.85")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="hal-mutants-") as name:
        folder = Path(name)
        copy(folder)
        os.chdir(folder)
        places = [*folder.glob("*/src"), *folder.glob("*/*/src"), folder / "conformance/tests"]
        os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, places)), "HAL_TEST_SHARE": "0.1"}
        honest = subprocess.run(command(options.of), shell=True, capture_output=True, text=True, check=False)
        if honest.returncode:
            print(f"mutants: without any, the tests fail\n{honest.stdout[-3000:]}")
            return 1
        print(f"{options.count} mutants, --seed {options.seed}", flush=True)
        files = [folder / name for name in FILES[options.of] if options.file in name]
        killed, every = run(drawn(files, options.count, options.seed), command(options.of))
        os.chdir(ROOT)
    print(f"{killed} of {every} mutants are killed")
    return int(killed < options.share * every)


if __name__ == "__main__":
    sys.exit(main())
