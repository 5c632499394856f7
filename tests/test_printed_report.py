"""A report parsed from its printed form equals its JSON form."""

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
    command = [sys.executable, "-m", "hal_conformance", "cpu", "--only=G7,G25", "--profile=quick", "--examples=1"]
    done = subprocess.run([*command, f"--report={file}"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    should = json.loads(file.read_text(encoding="utf-8"))
    found = printed.printed_report(done.stdout.splitlines())
    for name in ("device", "origin", "versions", "capabilities", "fallbacks"):
        assert found["header"][name] == should["header"][name], name
    assert should["header"]["fallbacks"]
    assert found["header"]["effort"]["profile"] == should["header"]["effort"]["profile"]
    names = [name for name in found["guarantees"][0] if name != "tests"]  # of these, only their number is printed
    left = sum(entry["note"] == "not chosen (--only)" for entry in should["guarantees"])
    assert left > 20
    assert [line for line in done.stdout.splitlines() if "not chosen" in line] == [f"  {left} not chosen (--only)"]
    entries = [{name: e[name] for name in names} | {"tests": len(e["tests"])} for e in should["guarantees"]]
    assert found["guarantees"] == entries
    assert {entry["status"] for entry in entries} == {"checked", "skipped"}


@pytest.mark.parametrize(
    "lines", [[], ["hal conformance: cpu:0 (x 1)", "  a 1", "  capabilities: none", "  profile quick"]]
)
def test_what_is_no_whole_report_is_refused(lines):
    with pytest.raises(ValueError, match=r"no line|0 of \d+"):
        printed.printed_report(lines)


def report(*entries):
    """A report of four guarantees: status, note and number of tests of each."""
    names = ("status", "note", "tests")
    guarantees = [{"guarantee": f"G{at}"} | dict(zip(names, entry, strict=True)) for at, entry in enumerate(entries)]
    return {"header": {"device": "cuda:0"}, "guarantees": guarantees}


def test_what_one_run_of_a_proof_left_out_another_has_checked():
    whole = report(
        ("checked", "14 of 16: needs ranks", 16),
        ("skipped", "needs ranks", 1),
        ("checked", "2 of 5: needs tensors", 5),
        ("checked", "", 3),
        ("checked", "2 of 4: needs ranks", 4),
    )
    ranks = report(
        ("checked", "", 14), ("checked", "", 1), ("checked", "", 5), ("skipped", "not chosen", 0), ("checked", "", 1)
    )
    for reports in ([whole, ranks], [ranks, whole]):
        (found,) = printed.together(reports)
        told = [(entry["status"], entry["note"]) for entry in found["guarantees"]]
        assert told[:4] == [("checked", "")] * 4
        assert found["guarantees"][4]["note"] == "2 of 4: needs ranks", "of the two that it left out, one was checked"
    (alone,) = printed.together([whole])
    assert alone == whole
