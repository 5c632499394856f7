"""Who may import whom: ``tools/rooms.py`` sees each thing that it looks for; the host holds on to what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = "core/src/hal_core"


def check(folder, files):
    """What the tool says of a tree with these files, and its exit status."""
    tool = folder / "tools/rooms.py"
    tool.parent.mkdir()
    tool.write_text((ROOT / "tools/rooms.py").read_text(encoding="utf-8"))
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    done = subprocess.run([sys.executable, tool], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines(), done.returncode


TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
SOUND = {
    f"{CORE}/__init__.py": "from .slots.state import State\n",  # a face: what it hands on makes no circle
    f"{CORE}/slots/__init__.py": "",
    f"{CORE}/slots/state.py": TYPES + "from ..memory import views\n",
    f"{CORE}/memory/__init__.py": "",
    f"{CORE}/memory/views.py": "from hal_core import errors\n",
    f"{CORE}/errors.py": "",
    "hal/engine.py": "from hal_core import State\nimport hal_core.devices\nfrom .other import thing\n",
    "plugins/new/src/hal_new/device.py": "from hal_core.devices import AsyncDevice\n",
    "examples/one/hal_one/device.py": "from hal_core.devices import AsyncDevice\n",
    f"{CORE}/devices/__init__.py": "",
}


def test_a_tree_without_faults_passes(tmp_path):
    assert check(tmp_path, SOUND) == ([], 0)


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            f"{CORE}/memory/views.py",
            TYPES + "from ..slots.state import State\n",
            "circle: hal_core.memory -> hal_core.slots -> hal_core.memory",
        ),
        (
            f"{CORE}/memory/views.py",
            "def f():\n    import hal_core.slots.state\n",
            "circle: hal_core.memory -> hal_core.slots -> hal_core.memory",
        ),
        (
            "hal/engine.py",
            "from hal_core.slots.state import State\n",
            "hal/engine.py:1 imports hal_core.slots.state, which",
        ),
        ("hal/engine.py", "from hal_core import slots\n", "hal/engine.py:1 imports hal_core.slots, which"),
        (
            "plugins/new/src/hal_new/device.py",
            TYPES + "import hal_core.errors\n",
            "hal_new/device.py:3 imports hal_core.errors, which",
        ),
        (
            "examples/one/hal_one/device.py",
            "def f():\n    from hal_core import errors\n",
            "hal_one/device.py:2 imports hal_core.errors, which",
        ),
    ],
)
def test_each_fault_is_named(tmp_path, file, text, told):
    found, status = check(tmp_path, SOUND | {file: text})
    assert status == 1
    (line,) = found
    assert told in line


def test_circles_of_files_in_a_folder_are_named_and_files_beside_the_folders_are_counted(tmp_path):
    more = {f"{CORE}/slots/a.py": "from .b import b\n", f"{CORE}/slots/b.py": "from . import a\n"}
    more |= {f"{CORE}/{name}.py": "" for name in "abcdefg"}
    found, status = check(tmp_path, SOUND | more)
    assert status == 1
    circle, count = found
    assert circle == "circle: hal_core.slots.a -> hal_core.slots.b -> hal_core.slots.a"
    assert count.startswith("9 files beside the folders of hal_core, at most 8: __init__.py, a.py, ")


def test_the_check_is_part_of_lint():
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    assert "tools/rooms.py" in lint


def through(text):
    """Lines that reach through a bound device to the device behind it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr == "device":
            inner = node.value
            if (inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")) in ("device", "bound"):
                yield node.lineno


def test_the_host_reaches_through_no_bound_device():
    """What a worker needs of its device is public on it, behind the checks of the policy."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "hal").rglob("*.py"))
        for line in through(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert {*through("self.device.device.copy_out()\nbound.device.index\nself.device.copy_out()\n")} == {1, 2}
