"""The faces: one table of names each, from which the type checkers' file is made."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core/src/hal_core"
FACES = {"hal_core": CORE} | {f"hal_core.{name}": CORE / name for name in ("devices", "frames", "handover")}


CHECK = """
import ast, importlib, sys
face, stub = sys.argv[1:]
module, exported = importlib.import_module(face), {}
for node in ast.parse(open(stub).read()).body:
    source = importlib.import_module("." * node.level + node.module, face)
    exported |= {alias.asname: getattr(source, alias.name) for alias in node.names}
assert exported and exported.keys() == set(module.__all__)
wrong = [name for name, value in exported.items() if getattr(module, name) is not value]
assert not wrong, wrong
"""
"""Run in a process where no other test has changed a module."""


@pytest.mark.parametrize("face", FACES)
def test_a_stub_imports_each_name_from_where_it_is(face):
    command = [sys.executable, "-c", CHECK, face, FACES[face] / "__init__.pyi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_name_that_moved_says_where_it_is():
    from hal_core.devices import _MOVED

    for name, module in _MOVED.items():
        with pytest.raises(ImportError, match=rf"{name} moved from hal_core.devices to {module} .*pip install"):
            exec(f"from hal_core.devices import {name}")
        assert hasattr(importlib.import_module(module), name)
