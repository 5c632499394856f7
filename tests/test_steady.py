"""The command that runs sensitive tests again and again: it finds the files, and a test that fails now and then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FICKLE = """
import pathlib, subprocess
def test_fickle():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    seen.write_text(seen.read_text() + "." if seen.exists() else ".")
    assert len(seen.read_text()) != 2
"""


def steady(*arguments):
    command = [sys.executable, ROOT / "tools" / "steady.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_files_with_processes_ranks_or_deadlines_are_listed():
    listed = steady("--list").stdout.split()
    assert {"core/tests/groups/test_lost.py", "tests/transport/test_bad_peers.py"} <= set(listed)
    assert "core/tests/test_dtypes.py" not in listed


@pytest.mark.conform
def test_a_test_that_fails_once_is_named_with_how_often(tmp_path):
    folder = ROOT / "tests" / f"steady_{tmp_path.name}"
    folder.mkdir()
    try:
        (folder / "test_fickle.py").write_text(FICKLE)
        run = steady("--times", "3", "--busy", "1", f"tests/{folder.name}")
    finally:
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"  1 x tests/{folder.name}/test_fickle.py::test_fickle" in run.stdout
    assert run.stdout.endswith("1 failures of 1 tests, 0 broken runs\n")


def test_nothing_to_run_is_told():
    run = steady("tests/sampling/oracle.py")
    assert (run.returncode, run.stdout.strip()) == (2, "no such file below tests/sampling/oracle.py")
