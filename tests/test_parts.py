"""``tools/part`` tells a part's times, shows a failure whole, and skips what cannot run; the plans are those of CI."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("code", "status", "line", "output"),
    [
        ("echo $((7 * 191))", 0, r"well, \d+ s, \d+ \+ \d+ s of processor time", False),
        ("echo $((7 * 191)); exit 3", 1, r"FAILED, \d+ s, \d+ \+ \d+ s of processor time", True),
        ("no/such/command $((7 * 191))", 1, r"FAILED, .*", False),
        ("echo so; echo no such program; exit 77", 0, "skipped, no such program", False),
    ],
)
def test_a_part_is_shown_with_its_time_and_a_failure_with_its_output(tmp_path, code, status, line, output):
    page = tmp_path / "page.md"
    command, environment = [ROOT / "tools" / "part", "one", code], os.environ | {"RECORD": str(page)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status
    first, *_, last = done.stdout.splitlines()
    assert first == "== one: begins"
    assert re.fullmatch(f"== one: {line}", last)
    assert ("1337" in done.stdout) == output
    assert re.fullmatch(rf"\| one \| {line.partition(',')[0]} \| .* \| `.*` \|\n", page.read_text())


def test_a_part_at_the_limit_is_named():
    command = ["timeout", "1", ROOT / "tools" / "part", "hangs", "sleep 1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 124
    assert done.stdout == "== hangs: begins\n== hangs: still runs at the limit, and is ended\n"


def commands(plan):
    listed = subprocess.run(
        ["make", "--no-print-directory", "-n", "-f", "tools/parts.mk", *plan.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.splitlines()


def test_ci_runs_what_make_conform_runs_and_stops_within_ninety_minutes():
    assert {*commands("conform")} < {*commands("ci")}
    assert all(line.startswith("tools/part ") for plan in ("ci", "nightly") for line in commands(plan))
    assert len(commands("liars matrix")) == 2
    script = (ROOT / ".ci" / "run").read_text()
    assert "timeout -k 20 85m" in script
    assert "make test && make .venv/.ray && exec make" in script
