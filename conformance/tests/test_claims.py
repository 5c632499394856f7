"""Claims that cannot be checked from outside are in the report, by guarantee, and the verdict names them."""

import pytest
from hal_conformance.harness import claims
from hal_conformance.report.outcomes import IN_PART, NOT_CHOSEN, Report
from hal_conformance.report.rendering import lines, render, verdict, wrapped


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr(claims, "CLAIMS", {})
    claims.note_unchecked(26, "raises_faults: every fault is raised at once", cure="offer native_objects()")
    claims.note_unchecked(26, "raises_faults: every fault is raised at once", cure="offer native_objects()")
    claims.note_allowance(7, "keeps: 3 small blocks a call")
    return list(claims.CLAIMS)


HEADER = {"versions": {}, "kit": "", "date": "", "seconds": 0.0, "system": "", "processor": ""}


def entry(number, found, status="checked"):
    mine = [str(claim) for claim in found if claim.guarantee == number]
    return {
        "guarantee": f"G{number}",
        "hook": "",
        "gist": "",
        "status": status,
        "note": "",
        "tests": [],
        "claims": mine,
    }


def test_a_claim_is_under_its_guarantee_and_changes_the_verdict(noted):
    report = Report(HEADER, [entry(number, noted) for number in (1, 7, 26)])
    printed = list(lines(report))
    unchecked = "not checked: raises_faults: every fault is raised at once (offer native_objects())"
    assert [line.strip() for line in printed if unchecked in line] == [unchecked]
    assert [line.strip() for line in printed if "keeps" in line] == ["allowed: keeps: 3 small blocks a call"]
    assert report.ok
    assert verdict(report) == "conforms, but for G7, G26"
    assert verdict(Report(HEADER, [entry(1, noted)])) == "conforms as far as checked"


def test_what_fails_does_not_conform_for_all_its_claims(noted):
    report = Report(HEADER, [entry(7, noted, "failed")])
    assert verdict(report) == "does not conform"


def test_what_only_has_left_of_a_guarantee_is_counted_by_itself():
    entries = [entry(8, []), entry(9, []) | {"note": IN_PART}, entry(10, [], "skipped") | {"note": NOT_CHOSEN}]
    printed = list(lines(Report(HEADER, entries)))
    assert [line.split()[:3] for line in printed[3:-1]] == [["G8", "ok"], ["G9", "in", "part"]]
    assert printed[-1] == "  1 checked, 1 in part, 1 not chosen (--only): conforms as far as checked"


def test_what_was_checked_in_part_is_so_in_each_report():
    found = Report(HEADER, [entry(8, []), entry(9, []) | {"note": "2 of 4: needs async_d2h"}])
    printed = list(lines(found))
    assert [line.split()[:3] for line in printed[3:-1]] == [["G8", "ok"], ["G9", "in", "part"]]
    assert printed[-1] == "  1 checked, 1 in part: conforms as far as checked"
    assert "<td>in part</td><td>2 of 4: needs async_d2h</td>" in render(found, "page.html")


def test_long_lines_are_wrapped_between_words_but_commands():
    assert wrapped("  G9   ok      every field of every slot", 24) == "  G9   ok      every\n    field of every slot"
    assert wrapped(command := "    reproduce: hal conform cpu --only G9", 24) == command
