"""docs/fields.md: its worker runs unchanged, on cpu and sim, and the kit proves its fields."""

import gc
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from hal_conformance.report.command import main as conform
from hal_core import InvalidValue

PAGE = (Path(__file__).parents[1] / "docs/fields.md").read_text(encoding="utf-8")
SHOWN = """\
{'b': [9], 'a': [105]} [1 0 1 0]
{'b': [9], 'a': [106]} [2 0 2 0]
{'a': [107]} [2 0 3 0]
{'a': [105]} [2 0 4 0]
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """The page's worker, as a module."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    lines = code.strip().splitlines()
    assert len(lines) <= 60, f"{len(lines)} lines"
    (tmp_path / "worker.py").write_text(code)
    spec = importlib.util.spec_from_file_location("worker_of_the_page", tmp_path / "worker.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_worker_of_the_page_runs(worker, device, capfd):
    if device == "sim":
        pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    worker.main(device)
    assert capfd.readouterr().out == SHOWN


def test_the_kit_proves_the_fields_of_the_worker(worker, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    given = ["cpu", "--only", "G11", "--profile", "quick", "--examples", "2", "--report", str(report)]
    gc.freeze()
    assert conform([*given, "--fields", f"{worker.__name__}:FIELDS"]) == 0
    assert f"--fields {worker.__name__}:FIELDS" in report.read_text()
    assert gc.get_freeze_count(), "the kit unfroze what its caller had frozen"


@pytest.mark.parametrize("given", ["worker_of_the_page:main", "worker_of_the_page:none", "nowhere:FIELDS"])
def test_g26_fields_that_are_none_are_refused_by_the_kit(worker, given):
    with pytest.raises(InvalidValue, match=r"^--fields: "):
        conform(["cpu", "--only", "G9", "--fields", given])
