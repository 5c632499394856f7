"""Which package imports which: each contract of import-linter finds its fault; the host uses public names alone."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check(folder, files):
    """Lint a tree of packages by this repository's contracts. Return its output, and the exit status."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = text[text.index("[[tool.importlinter.contracts]]") : text.index("[tool.pytest.ini_options]")]
    packages = sorted({name.partition("/")[0] for name in files})
    (folder / "pyproject.toml").write_text(f"[tool.importlinter]\nroot_packages = {packages}\n\n{contracts}")
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout, done.returncode


TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
SOUND = {
    "hal_core/__init__.py": "from .slots.state import State\n",  # a face: its imports make no circle
    "hal_core/slots/__init__.py": "",
    "hal_core/slots/state.py": TYPES + "from ..memory import views\n",
    "hal_core/memory/__init__.py": "",
    "hal_core/memory/views.py": "from hal_core import errors\n",
    "hal_core/errors.py": "",
    "hal_core/devices/__init__.py": "",
    "hal_conformance/__init__.py": "from hal_core.slots.state import State\n",  # the kit may look inside
    "hal/__init__.py": "",
    "hal/other.py": "",
    "hal_engine/__init__.py": "",
    "hal_engine/engine.py": "from hal_core import State\nimport hal_core.devices\nfrom .other import thing\n",
    "hal_engine/other.py": "",
    "hal_cuda/__init__.py": "",
    "hal_cuda/device.py": "from hal_core.devices import AsyncDevice\n",
    "hal_paddle/__init__.py": "from hal_core.devices import StreamDevice\n",
    "hal_paddle_runner/__init__.py": "import hal_engine.engine\n",
    "hal_torch/__init__.py": "import hal_engine.engine\n",
    "hal_fastdeploy/__init__.py": "import hal\n",
    "hal_maca/__init__.py": "",
    "hal_opencl/__init__.py": "",
    "hal_sim/__init__.py": "",
    "hal_torch_device/__init__.py": "",
    "hal_vllm/__init__.py": "import hal\n",
    "hal_xpu/__init__.py": "from hal_paddle import StreamDevice\n",
}
CIRCLES, FACES, ONE_WAY = "No circles between", "The core is imported through", "Imports point one way"
DEVICES, ONE_DEVICE = "Devices know the core alone", "Nothing is written for one device"
ALL = CIRCLES, FACES, ONE_WAY, DEVICES, ONE_DEVICE


def test_a_tree_without_faults_passes(tmp_path):
    printed, status = check(tmp_path, SOUND)
    assert status == 0, printed
    assert "Contracts: 5 kept, 0 broken." in printed


@pytest.mark.parametrize(
    ("file", "text", "broken"),
    [
        ("hal_core/memory/views.py", TYPES + "from ..slots.state import State\n", CIRCLES),
        ("hal_core/memory/views.py", "def f():\n    import hal_core.slots.state\n", CIRCLES),
        ("hal_engine/other.py", "from . import engine\n", CIRCLES),
        ("hal_engine/engine.py", "from hal_core.slots.state import State\n", FACES),
        ("hal_engine/engine.py", "from hal_core import slots\n", FACES),
        ("hal_cuda/device.py", TYPES + "import hal_core.errors\n", FACES),
        ("hal_core/errors.py", "import hal_engine.engine\n", f"{ONE_WAY} {DEVICES}"),
        ("hal_engine/engine.py", "def f():\n    import hal_cuda.device\n", ONE_DEVICE),
        ("hal_engine/engine.py", "def f():\n    import hal_paddle\n", ONE_DEVICE),
        ("hal_paddle/place.py", "import hal_xpu\n", DEVICES),
        ("hal_cuda/device.py", "import hal\n", DEVICES),
        ("hal/other.py", "def f():\n    import hal_engine.engine\n", ONE_WAY),
        ("hal_engine/other.py", "def f():\n    import hal_paddle_runner\n", ONE_WAY),
        ("hal_engine/other.py", TYPES + "import hal_torch\n", ONE_WAY),
        ("hal_torch/steps.py", "import hal_paddle_runner\n", ONE_WAY),
    ],
)
def test_each_fault_is_named(tmp_path, file, text, broken):
    printed, status = check(tmp_path, SOUND | {file: text})
    assert status == 1
    named = [line.partition(" BROKEN")[0] for line in printed.splitlines() if " BROKEN" in line]
    assert [name for name in ALL if any(one.startswith(name) for one in named)] == [
        name for name in ALL if name in broken
    ]
    assert file.removesuffix(".py").replace("/", ".") in printed or broken == CIRCLES


def test_the_check_is_part_of_lint():
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    assert "lint-imports" in lint


def through(text):
    """Lines that reach through a bound device to the device behind it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr == "device":
            inner = node.value
            if (inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", "")) in ("device", "bound"):
                yield node.lineno


def test_the_host_reaches_through_no_bound_device():
    """The interface that a worker needs is public on its device, behind the checks of the policy. `hal doctor` is not a
    worker: it reads the memory that a plugin allocates.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted([*(ROOT / "hal").rglob("*.py"), *(ROOT / "engine/src").rglob("*.py")])
        if path.name != "doctor_child.py"
        for line in through(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert {*through("self.device.device.copy_out()\nbound.device.index\nself.device.copy_out()\n")} == {1, 2}
