"""``tools/support_table.py`` takes the reports of a proof's runs of the kit together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("table", Path(__file__).parents[1] / "tools" / "support_table.py")
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)


def report(*entries):
    """A report of the kit: status, note and number of tests of each guarantee."""
    guarantees = [
        {"guarantee": f"G{at}", "status": status, "note": note, "tests": [{}] * tests}
        for at, (status, note, tests) in enumerate(entries)
    ]
    return {"header": {"device": "cuda:0"}, "guarantees": guarantees}


def test_what_one_run_of_a_proof_left_out_another_has_checked():
    complete = report(
        ("checked", "14 of 16: needs ranks", 16),
        ("skipped", "needs ranks", 1),
        ("checked", "2 of 5: needs tensors", 5),
        ("checked", "", 3),
        ("checked", "2 of 4: needs ranks", 4),
    )
    ranks = report(
        ("checked", "", 14), ("checked", "", 1), ("checked", "", 5), ("skipped", "not chosen", 0), ("checked", "", 1)
    )
    for reports in ([complete, ranks], [ranks, complete]):
        (found,) = table.together(reports)
        rows = [(entry["status"], entry["note"]) for entry in found["guarantees"]]
        assert rows[:4] == [("checked", "")] * 4
        assert found["guarantees"][4]["note"] == "2 of 4: needs ranks", "of the two that it left out, one was checked"
    (alone,) = table.together([complete])
    assert alone == complete
