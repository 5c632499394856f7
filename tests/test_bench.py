"""``hal bench``: the rows of a device, one object of JSON, two results beside each other, and what is refused."""

import json
import sys

import pytest

from hal.cli import bench

from .commands import LIBRARIES, Terminal

WARM = LIBRARIES
ZEROS = {part: {"p25": 0, "p50": 0, "p75": 0} for part in ("call_us", "done_us")}
HOOKS = {"insert_tasks", "async_set_value", "save_output", "broadcast_tokens"}


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_each_hook_has_rows_and_two_results_compare(command, tmp_path, device):
    done = command("bench", device, "--rounds", "10", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert (found["device"], found["rounds"]) == (f"{device}:0", 10)
    assert {row["hook"] for row in found["rows"]} == HOOKS
    for row in found["rows"]:
        for part in ("call_us", "done_us"):
            assert 0 < row[part]["min"] <= row[part]["p25"] <= row[part]["p50"] <= row[part]["p75"]
        assert row["call_us"]["min"] <= row["done_us"]["min"]
    former, twice = tmp_path / "a.json", tmp_path / "b.json"
    former.write_text(done.out, encoding="utf-8")
    for row in found["rows"]:
        row["call_us"] = {part: 2 * value for part, value in row["call_us"].items()}
    twice.write_text(json.dumps(found), encoding="utf-8")
    compared = command("bench", "--compare", str(former), str(twice))
    assert compared.status == 0, compared.err
    lines = compared.out.splitlines()[-len(found["rows"]) :]
    assert all("  2.00  " in line and "  1.00  " in line for line in lines), compared.out


def test_a_table_has_a_line_for_each_row(command):
    done = command("bench", "cpu", "--rounds", "10")
    assert done.status == 0, done.err
    assert {line.split()[0] for line in done.out.splitlines()[3:]} == HOOKS


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "No such file or directory (give two files)"),
        ("{}", "is no result (make it with: hal bench --json > FILE)"),
        ('{"rows": [{"hook": 1}], "device": "x", "date": "y"}', "is no result (make it with"),
        (json.dumps({"rows": [{"hook": "h", "size": "s", **ZEROS}], "device": "x", "date": "y"}), "is no result"),
        ('{"rows": [], "device": "x", "date": "y"}', "have no row in common (make both with one version"),
    ],
)
def test_what_is_no_result_is_refused(command, tmp_path, content, what):
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    done = command("bench", "--compare", str(file), str(file))
    assert (done.status, done.out) == (2, "")
    assert what in done.err
    assert command("bench", "cpu", "--compare", str(file), str(file)).status == 2


def test_a_narrow_terminal_has_the_hooks_above_their_sizes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    bench._print(["hook", "size", "call"], [["insert_tasks", "1", "10.0"], ["insert_tasks", "16", "20.0"]])
    lines = ["hook", "  size  call", "insert_tasks", "  1     10.0", "  16    20.0"]
    assert terminal.getvalue().splitlines() == lines
