"""The table of guards matches the code, and the script distinguishes a guard that matters from one that does not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="module")
def guards():
    sys.path.insert(0, str(TOOLS))
    try:
        spec = importlib.util.spec_from_file_location("hal_guards", TOOLS / "guards.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(TOOLS))
    return module


def test_every_guard_is_in_the_source_once_and_its_tests_exist(guards):
    assert guards.misplaced(guards.GUARDS) == []
    kit = "\n".join(path.read_text() for path in (TOOLS.parent / "conformance/src/hal_conformance").glob("test_*.py"))
    for guard in guards.GUARDS:
        for test in guard.tests:
            file, _, name = test.rpartition("::")
            where = (TOOLS.parent / file).read_text() if file else kit
            assert f"def {name}(" in where, f"{guard.name}: no test {test}"


def test_the_guards_cover_every_part_that_has_some(guards):
    files = {Path(guard.file).stem for guard in guards.GUARDS}
    parts = {"policy", "host_table", "checks", "insertion", "staging", "ticket", "channel", "update", "convert"}
    assert files >= parts
    assert len(guards.GUARDS) >= 12


@pytest.mark.conform
def test_a_guard_that_nothing_misses_fails_the_script(guards, monkeypatch, capsys):
    real = next(guard for guard in guards.GUARDS if guard.guarantee == "G15")
    before, after = "A wrapper cannot skip the call", "A wrapper can not skip the call"
    idle = guards.Guard("a comment", "G15", real.file, before, after, real.tests)
    monkeypatch.setattr(guards, "GUARDS", (idle,))
    assert guards.main([]) == 1
    assert "SURVIVES" in capsys.readouterr().out


def test_the_table_can_be_listed():
    command = [sys.executable, str(TOOLS / "guards.py"), "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tails of rows are reset" in done.stdout
