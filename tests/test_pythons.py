"""`tools/pythons.py`: which interpreters it takes, and that CI has a part for each version that the README names."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "pythons.py"


@pytest.fixture(scope="module")
def pythons():
    spec = importlib.util.spec_from_file_location("hal_pythons", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreter(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_shim_that_does_not_run_is_no_interpreter_and_a_sibling_of_this_is(pythons, tmp_path, monkeypatch):
    shim = interpreter(tmp_path / "shims" / "python3.12", "echo 'python3.12: command not found' >&2; exit 127")
    interpreter(tmp_path / "another" / "python3.12", "echo 3.11")
    monkeypatch.setenv("PATH", f"{shim.parent}:{tmp_path / 'another'}")
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "versions" / "3.11.7"))
    assert pythons.find_python("3.12") is None
    sibling = interpreter(tmp_path / "versions" / "3.12.1" / "bin" / "python3.12", "echo 3.12")
    assert pythons.find_python("3.12") == sibling


def test_a_version_that_is_not_found_is_named_and_skipped(tmp_path):
    done = subprocess.run([sys.executable, TOOL, "3.99"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        77,
        f"Python 3.99 was not found, on PATH or beside {sys.base_prefix}\n",
    )


def test_ci_checks_each_version_that_the_readme_names():
    first, last = re.search(r"Python 3\.(\d+) to 3\.(\d+)", (ROOT / "README.md").read_text(encoding="utf-8")).groups()
    plan = ["make", "--no-print-directory", "-n", "-f", "tools/parts.mk", "ci"]
    listed = subprocess.run(plan, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    checked = re.findall(r"tools/pythons\.py 3\.(\d+)'$", listed, re.MULTILINE)
    assert checked == [str(minor) for minor in range(int(first), int(last) + 1)]
