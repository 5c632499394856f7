"""``hal_core.conformance``, the kit's former name, and a core without the kit."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = """
import sys

class Hiding:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("hal_conformance", "pytest", "hypothesis"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Hiding())
"""


def run(code, hidden=""):
    command = [sys.executable, "-c", hidden + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def test_the_former_name_resolves_on_first_use():
    done = run(
        "import sys, hal_core.conformance as former\n"
        "assert 'hal_conformance' not in sys.modules\n"
        "import hal_conformance\n"
        "assert former.RankPool is hal_conformance.RankPool\n"
        "from hal_core.conformance.suite import *\n"
        "import hal_conformance.suite\n"
        "assert set(hal_conformance.suite.__all__) <= set(globals())\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "use",
    [
        "from hal_core.conformance import RankPool",
        "import hal_core.conformance.suite",
        "import hal_core.conformance as former; former.main",
    ],
)
def test_without_the_kit_the_former_name_says_how_to_install_it(use):
    done = run(use, HIDDEN)
    assert done.returncode == 1
    assert "the distribution paddle-hal-conformance (pip install ./conformance in hal's checkout)" in done.stderr


def test_the_support_of_an_example_loads_without_the_kit():
    done = run("sys.path.insert(0, 'examples/queue'); import hal_example_queue.conformance", HIDDEN)
    assert done.returncode == 0, done.stderr
