"""A report of the conformance kit, read back from what it printed: all that is kept of a run on borrowed hardware."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hal_core.capabilities import Capabilities
from hal_core.conformance.guarantees import GUARANTEES
from hal_core.conformance.rendering import MARKS

STATUSES = {mark: status for status, mark in MARKS.items()}
HOOKS = {guarantee.name: guarantee.hook for guarantee in GUARANTEES}
DEVICE = re.compile(r"hal conformance: (?P<device>.+) \((?P<origin>.*)\)")
ROW = re.compile(r"  (?P<name>G\d+) +(?P<mark>\S+) +.*?  (?:\d+ tests)?(?:  \[(?P<note>.*)\])?")


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
    guarantees = []
    for line in lines[begin + 4 :]:
        if line.startswith("  falls back, "):
            hook, _, reason = line.removeprefix("  falls back, ").partition(": ")
            header["fallbacks"][hook] = reason
        elif row := ROW.fullmatch(line):
            status = STATUSES[row["mark"]]
            guarantees.append(
                {"guarantee": row["name"], "hook": HOOKS[row["name"]], "status": status, "note": row["note"] or ""}
            )
    if [entry["guarantee"] for entry in guarantees] != list(HOOKS):
        raise ValueError(f"it lists {len(guarantees)} of {len(HOOKS)} guarantees")
    return {"header": header, "guarantees": guarantees}


def _capabilities(text: str) -> dict[str, Any]:
    """What is named, and false or "" for what is not, as the JSON form has it."""
    named = {} if text == "none" else dict(part.partition("=")[::2] for part in text.split(", "))
    plain = Capabilities.__dataclass_fields__
    found: dict[str, Any] = {}
    for name, field in plain.items():
        if name != "fallbacks":
            found[name] = named.get(name, "") if field.type == "str" else name in named
    return found
