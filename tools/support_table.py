"""The support table, made from reports of the conformance kit alone.

    hal conform maca --report /tmp/maca.json              # or pytest … --hal-report=/tmp/maca.json
    python tools/support_table.py /tmp/maca.json …        # take reports, then write docs/support.md
    python tools/support_table.py proof.json --on H200    # or those in the record of a proof on hardware
    python tools/support_table.py --check                 # write no file; list outdated parts (for tests)

The reports are kept in docs/support.json, by the device's own name, so that a substituted device has its own row.
``--on TEXT`` names the hardware of the reports given, where it is more than the machine's architecture.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal_conformance.report.rendering import standing

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "docs" / "support.json", ROOT / "docs" / "support.md"
HOOKS = ("insert_tasks", "async_set_value", "save_output", "broadcast_tokens")
CPU = """\
On x86 the host's CPU needs AVX2 wherever Paddle is used (Intel from Haswell, 2013; AMD from Excavator, 2015): for
`hal run`'s model and the devices over Paddle. AVX-512 is used where it is there and
needed nowhere. What of Paddle was checked for it: [evidence/cpus.md](evidence/cpus.md). The host side of `cpu`,
`cuda` and `sim` needs no more than NumPy: its wheels of 2.4 are for x86-64-v2, so a virtual CPU such as `kvm64` or
`qemu64` is too old. CPUs that are not x86 were not tried.
"""
CUDA = """\
The rows of `cuda` are of its native path. Without the native part (no C compiler when it was installed) the device is a
fallback: the core's asynchronous base over the driver's primitives. It passes the kit's quick profile over the
library that stands in for the driver (2026-11-24), and has not been run on a GPU.
"""
LEFT_OUT = re.compile(r"(\d+) of (\d+): ")
"""The note of a guarantee of which some tests were skipped: how many were, of how many."""
RUN = ("kit", "date", "system", "processor")
"""What a report's head says of the run, since the kit of 2026-11-29."""
ASYNC = {"insert_tasks": "async_h2d", "async_set_value": "async_h2d", "save_output": "async_d2h"}


def taken(report: dict[str, Any], on: str, before: dict[str, Any]) -> dict[str, Any]:
    """The kept part of one report. ``since``: the plugin's version when the device was first taken."""
    header = report["header"]
    capabilities = header["capabilities"]
    distribution, _, version = header["origin"].partition(" ")
    where = capabilities["substituted"] and f"no chip: {capabilities['substituted']} stands in"
    return {
        "distribution": distribution,
        "version": version,
        "since": before.get("since", version),
        "on": where or on or f"{platform.system()} {platform.machine()}",
        "capabilities": capabilities,
        "fallbacks": header["fallbacks"],
        "run": {name: header[name] for name in RUN if name in header},
        "versions": {**header["versions"], **header.get("runtime", {})},
        "profile": header["effort"]["profile"],
        "guarantees": {
            entry["guarantee"]: {"hook": entry["hook"], "status": entry["status"], "note": one_line(entry["note"])}
            | ({"claims": entry["claims"]} if entry.get("claims") else {})
            for entry in report["guarantees"]
        },
    }


def one_line(note: str) -> str:
    """A note's first line, and that there was more."""
    first, _, more = note.partition("\n")
    return f"{first.strip()} …" if more else note


def how(row: dict[str, Any], hook: str) -> str:
    """How the bytes of a hook move, by the device's own capabilities and fallbacks."""
    able, reason = row["capabilities"], row["fallbacks"].get(hook, "")
    if hook == "broadcast_tokens":
        library = able["collective"]
        return f"one collective of one slice ({reason or library})" if library else "one rank only"
    text = "asynchronous" if able[ASYNC[hook]] else "synchronous"
    if hook == "insert_tasks":
        text += ", at most two submissions a call" if able["fused_scatter"] else ", one upload and a scatter a width"
    if hook == "save_output":
        text += ", one copy of adjacent fields"
    return text + (", from locked memory" if able["pinned_host"] else "") + (" (falls back)" if reason else "")


def verdict(row: dict[str, Any], hook: str) -> str:
    """Return the kit's result for the guarantees of a hook."""
    found = [(name, standing(entry)) for name, entry in row["guarantees"].items() if entry["hook"] == hook]
    checked = [name for name, word in found if word == "checked"]
    others = sorted(
        [f"{name} {word}" for name, word in found if word != "checked"], key=lambda one: "in part" not in one
    )
    return ", ".join([" ".join(checked) + " checked" if checked else "", *others]).strip(", ")


def table(kept: dict[str, Any]) -> str:
    """One row for each device and hook."""
    lines = ["| device | hook | how bytes move | verified on | by the kit | since |", "|---|---|---|---|---|---|"]
    for device, row in sorted(kept.items()):
        since = f"{row['distribution']} {row['since']}"
        for at, hook in enumerate(HOOKS):
            first = (device, row["on"], since) if at == 0 else ("", "", "")
            lines.append(
                f"| {first[0]} | `{hook}` | {how(row, hook)} | {first[1]} | {verdict(row, hook)} | {first[2]} |"
            )
    return "\n".join(lines)


def page(kept: dict[str, Any]) -> str:
    """Return docs/support.md: the table, and for each device its reasons and the unchecked parts."""
    parts = [
        "# What is supported, and on what it was verified\n",
        "Made by `tools/support_table.py` from reports of the conformance kit (`docs/support.json`); do not edit it.",
        "A substituted device ran the plugin's code on a place that stands in for its chip: nothing here says that the",
        "chip was ever used.\n",
        CPU,
        CUDA,
        table(kept),
    ]
    for device, row in sorted(kept.items()):
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        run = "".join(f"; {name} {value}" for name, value in row.get("run", {}).items())
        parts += [
            f"\n## {device}\n",
            f"{row['distribution']} {row['version']}, profile {row['profile']}{run}; {versions}.\n",
        ]
        parts += [f"- falls back, `{hook}`: {reason}" for hook, reason in row["fallbacks"].items()]
        for name, entry in row["guarantees"].items():
            if (word := standing(entry)) != "checked":
                parts.append(f"- {name} {word}: {entry['note'] or 'no reason given'}")
            parts += [f"- {name}, {claim}" for claim in entry.get("claims", ())]
    return "\n".join(parts) + "\n"


def reports(paths: list[Path]) -> list[dict[str, Any]]:
    """The reports in files: in the kit's JSON form, or several in a record of ``plugins/cuda/proof/prove.py``.

    The latter are parts of one proof: those of a device are taken together.
    """
    found: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    parts = [report for record in found for report in record.get("reports", ())]
    return [record for record in found if "header" in record] + together(parts)


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
            if more["status"] != "checked" or (left and len(one["tests"]) in (int(left[1]), int(left[2]))):
                return one
    return mine if mine["status"] == "checked" and (mine["note"] or not other["note"]) else other


def main() -> int:
    """Take reports, and write or check the pages made of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", type=Path)
    parser.add_argument("--on", default="", help="the hardware of these reports")
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    chosen = parser.parse_args()
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for report in reports(chosen.reports):
        device = report["header"]["device"].rpartition(":")[0]
        kept[device] = taken(report, chosen.on, kept.get(device, {}))
    made = {KEPT: json.dumps(dict(sorted(kept.items())), indent=1) + "\n", PAGE: page(kept)}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if chosen.check:
            print(f"{path.relative_to(ROOT)} is out of date: python tools/support_table.py", file=sys.stderr)
        else:
            path.write_text(made[path], encoding="utf-8")
    return 1 if chosen.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
