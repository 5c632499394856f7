"""A report read back from what it printed says what its JSON form says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("printed", Path(__file__).parents[1] / "tools" / "printed_report.py")
printed = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(printed)


def test_what_was_printed_is_read_back(tmp_path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "hal_core.conformance", "cpu", "--only=G3,G23", "--profile=quick"]
    done = subprocess.run([*command, f"--report={file}"], capture_output=True, text=True, timeout=120, check=True)
    should = json.loads(file.read_text(encoding="utf-8"))
    found = printed.printed_report(done.stdout.splitlines())
    for name in ("device", "origin", "versions", "capabilities", "fallbacks"):
        assert found["header"][name] == should["header"][name], name
    assert should["header"]["fallbacks"]
    assert found["header"]["effort"]["profile"] == should["header"]["effort"]["profile"]
    entries = [{name: entry[name] for name in found["guarantees"][0]} for entry in should["guarantees"]]
    assert found["guarantees"] == entries
    assert {entry["status"] for entry in entries} == {"checked", "skipped"}


@pytest.mark.parametrize(
    "lines", [[], ["hal conformance: cpu:0 (x 1)", "  a 1", "  capabilities: none", "  profile quick"]]
)
def test_what_is_no_whole_report_is_refused(lines):
    with pytest.raises(ValueError, match=r"no line|0 of 28"):
        printed.printed_report(lines)
