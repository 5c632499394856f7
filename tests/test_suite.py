"""Rules of the suite itself: one profile of Hypothesis, folders that share ranks, tests that need a compiler."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = [
    path
    for folder in ("tests", "core/tests", "plugins", "adapters", "runners")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def test_no_file_loads_a_hypothesis_profile_for_the_others():
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("load_profile", "register_profile")
    ]
    assert calls == []


def test_files_that_share_ranks_are_given_to_one_process():
    spec = importlib.util.spec_from_file_location("hal_suite_conftest", ROOT / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TOGETHER
    for folder in module.TOGETHER:
        assert list((ROOT / folder).glob("test_*.py")), f"{folder} has no tests any more: name where they are"


WITHOUT = """
import pytest

@pytest.mark.parametrize("number", range(2))
def test_simulated(number):
    raise RuntimeError("rank 0: sim: no C++ compiler found (tried g++) (install g++, or name one in the variable CXX)")

@pytest.fixture
def device():
    test_simulated(0)

def test_with_a_device(device): ...

def test_other():
    raise RuntimeError("something else")
"""


@pytest.mark.parametrize(("programs", "ended"), [((), "1 failed, 3 skipped"), (("g++",), "3 failed, 1 error")])
def test_what_needs_a_compiler_is_skipped_and_counted_without_one(tmp_path, programs, ended):
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "test_made.py").write_text(WITHOUT)
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "test_made.py")]
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTEST_XDIST_WORKER")}
    done = subprocess.run(
        command, cwd=tmp_path, env=kept | {"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert f"\n{ended} in " in done.stdout, done.stdout + done.stderr
    line = "3 skipped: sim: no C++ compiler found (tried g++) (install g++, or name one in the variable CXX)\n"
    assert (line in done.stdout) is (not programs)


def test_the_part_without_a_compiler_runs_every_file_that_uses_a_build():
    spec = importlib.util.spec_from_file_location("hal_no_compiler", ROOT / "tools" / "no_compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {str(path.relative_to(ROOT)) for path in module.files()}
    assert "adapters/fastdeploy/tests/test_insertion.py" in found
    assert "tests/overlap/test_waits.py" in found, "its device is opened by another file of its folder"
    assert "tests/test_help.py" not in found
