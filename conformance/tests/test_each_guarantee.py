"""``tools/each_guarantee.py``: a row of a device that conforms, and one of a device that does not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.conform, pytest.mark.long(30)]
TOOL = Path(__file__).parents[2] / "tools" / "each_guarantee.py"
RUN = f"""
import runpy, sys
sys.path.insert(0, {str(TOOL.parent)!r})
found = runpy.run_path({str(TOOL)!r})
found["FACTORIES"]["deaf"] = "kit_devices:deaf"
sys.exit(found["main"](sys.argv[1:]))
"""


def test_the_row_of_a_guarantee_counts_its_tests_and_names_failures():
    command = [sys.executable, "-c", RUN, "cpu", "deaf", "--only", "G4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    *_, row = done.stdout.splitlines()
    name, cpu, deaf = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "G4"
    assert cpu.partition(" ")[0].isdigit()
    assert "failed" not in cpu
    assert "failed**" in deaf
    assert re.search(r"^G4 on deaf:\ntest_g\d\d_", done.stderr, re.MULTILINE)
    assert "hal conform --only G4 --device-factory kit_devices:deaf" in done.stderr
