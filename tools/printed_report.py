"""A report of the conformance kit, parsed from its printed form: the only form kept of a run on borrowed hardware."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hal_conformance.harness.guarantees import GUARANTEES
from hal_conformance.report.outcomes import NOT_CHOSEN
from hal_conformance.report.rendering import MARKS
from hal_core.contract.capabilities import Capabilities

STATUSES = {mark: status for status, mark in MARKS.items()}
HOOKS = {guarantee.name: guarantee.hook for guarantee in GUARANTEES}
DEVICE = re.compile(r"hal conformance: (?P<device>.+) \((?P<origin>.*)\)")
FOLDED = re.compile(rf"  (\d+) {re.escape(NOT_CHOSEN)}")
LEFT_OUT = re.compile(r"(\d+) of (\d+): ")
ROW = re.compile(r"  (?P<name>G\d+) +(?P<mark>\S+) +.*?  (?:(?P<tests>\d+) tests)?(?:  \[(?P<note>.*)\])?")


def printed_report(lines: Sequence[str]) -> dict[str, Any]:
    """The header and guarantees of a printed report, as its JSON form has them. ValueError for any other text."""
    begin = next((at for at, line in enumerate(lines) if DEVICE.fullmatch(line)), None)
    if begin is None:
        raise ValueError("no line 'hal conformance: DEVICE (DISTRIBUTION VERSION)' in it")
    found = DEVICE.fullmatch(lines[begin])
    assert found is not None
    versions, able, effort = (line.strip() for line in lines[begin + 1 : begin + 4])
    header: dict[str, Any] = {
        "device": found["device"],
        "origin": found["origin"],
        "versions": dict(part.rsplit(" ", 1) for part in versions.split(", ")),
        "capabilities": _capabilities(able.removeprefix("capabilities: ")),
        "effort": {"profile": effort.split(",")[0].removeprefix("profile ")},
        "fallbacks": {},
    }
    listed: dict[str, dict[str, Any]] = {}
    folded = 0
    for line in lines[begin + 4 :]:
        if line.startswith("  falls back, "):
            hook, _, reason = line.removeprefix("  falls back, ").partition(": ")
            header["fallbacks"][hook] = reason
        elif row := ROW.fullmatch(line):
            listed[row["name"]] = _entry(row["name"], STATUSES[row["mark"]], row["note"] or "", int(row["tests"] or 0))
        elif count := FOLDED.fullmatch(line):
            folded = int(count[1])
    if len(listed) + folded != len(HOOKS):
        raise ValueError(f"it lists {len(listed)} of {len(HOOKS)} guarantees, and {folded} {NOT_CHOSEN}")
    guarantees = [listed.get(name) or _entry(name, "skipped", NOT_CHOSEN, 0) for name in HOOKS]
    return {"header": header, "guarantees": guarantees}


def _entry(name: str, status: str, note: str, tests: int) -> dict[str, Any]:
    return {"guarantee": name, "hook": HOOKS[name], "status": status, "note": note, "tests": tests}


def _capabilities(text: str) -> dict[str, Any]:
    """Return named values, and false or "" for missing ones, as the JSON form has it."""
    named = {} if text == "none" else dict(part.partition("=")[::2] for part in text.split(", "))
    plain = Capabilities.__dataclass_fields__
    found: dict[str, Any] = {}
    for name, field in plain.items():
        if name != "fallbacks":
            found[name] = named.get(name, "") if field.type == "str" else name in named
    return found


def together(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the reports of one device in a proof: parts that one run left out, another one with ``--only`` has checked.

    A note "14 of 16: …" is dropped if the second run left none of its own out and checked the 14, or all 16.
    """
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        device = report["header"]["device"]
        if device not in found:
            found[device] = report
            continue
        pairs = zip(found[device]["guarantees"], report["guarantees"], strict=True)
        found[device] = {**found[device], "guarantees": [_fuller(mine, other) for mine, other in pairs]}
    return list(found.values())


def _fuller(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for one, more in ((mine, other), (other, mine)):
        if one["status"] == "checked" and not one["note"]:
            left = LEFT_OUT.match(more["note"])
            if more["status"] != "checked" or (left and one["tests"] in (int(left[1]), int(left[2]))):
                return {**one, "tests": int(left[2]) if left else one["tests"]}
    return mine if mine["status"] == "checked" and (mine["note"] or not other["note"]) else other
