"""The report as vendors meet it: primitives first, the first failure at once, text, JSON and HTML of one run."""

from __future__ import annotations

import json

import pytest
from hal_conformance.report.outcomes import LONGEST, clipped

pytestmark = pytest.mark.long(15)
WARM = ("numpy", "hypothesis.stateful", "pytest")


def test_one_run_writes_text_json_and_html(tmp_path, conform):
    data, page = tmp_path / "report.json", tmp_path / "page.html"
    quick = ("--only=G25", "--profile=quick", "--examples=1")
    done = conform("cpu", *quick, f"--report={data}", f"--html={page}", code=0)
    assert "  G25  ok " in done.stdout
    assert json.loads(data.read_text(encoding="utf-8"))["ok"] is True
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    done = conform("cpu", *quick, "--json", f"--html={page}", code=0)
    assert json.loads(done.stdout)["ok"] is True


def test_an_unwritten_primitive_stops_the_run_in_thirty_lines(conform, tmp_path):
    report = tmp_path / "report.json"
    done = conform(
        "--device-factory=kit_devices:unwritten", "--profile=quick", "--examples=1", f"--report={report}", code=1
    )
    lines = done.stdout.splitlines()
    found = json.loads(report.read_text(encoding="utf-8"))
    ran = [test["test"] for entry in found["guarantees"] for test in entry["tests"] if test["outcome"] != "not run"]
    assert len(ran) == 1, ran
    assert len(lines) <= 30, done.stdout
    assert max(map(len, lines)) < LONGEST + 200
    assert "stopped: the primitives fail, by which every other test reads and writes" in done.stdout
    assert any(test["error"].count("x") >= 12_000 for entry in found["guarantees"] for test in entry["tests"])


def test_the_first_failure_is_shown_when_it_happens(conform):
    quick = ("--only=G4", "--profile=quick", "--examples=1")
    lines = conform("--device-factory=kit_devices:deaf", *quick, code=1).stdout.splitlines()
    shown = [at for at, line in enumerate(lines) if line.startswith("first failure: G4 test_g04_")]
    assert len(shown) == 1, lines
    last = next(at for at, line in enumerate(lines) if "[100%]" in line)
    assert shown[0] < last, "the tests after the first failure ran before it was shown"


def test_a_long_line_is_clipped_on_the_terminal():
    assert clipped("short") == "short"
    assert clipped("y" * 5000).endswith("(5000 characters, whole in --report FILE)")
    assert len(clipped("y" * 5000)) < LONGEST + 60
