"""Make the table of liars from the output of ``hal conform … --liars --json``.

    hal conform cpu --liars --json > cpu.json
    PYTHONPATH=conformance/tests hal conform --device-factory queued_device:keeping --liars --json > queue.json
    python tools/liars_table.py cpu=cpu.json queue=queue.json

A liar that the first device skips, because it cannot be detected there, is taken from the next. Prints the table, and
then how many were killed on each device, by which profile and in what time.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hal_conformance.liars import by_name

UNSEEN = ("sizes", "ring", "copies", "streams", "values", "slices", "life", "unseen", "unseen_later")
"""Modules whose liars were written by hands that had not seen the tests."""
LATER = (
    *("TensorsAreCopies", "TensorsLoseTheirMemory", "FreedUnderWork", "LargeValuesWaitForTheirStream"),
    *("CopiesUntilAWrite", "PlacesInThirtyTwoBits", "PlacesInThirtyOneBits"),
)
"""Those of these modules that were written later, together with their tests."""
COLUMNS = ("guarantee", "liar", "module", "device", "profile", "seconds", "killed by", "knew the test")


def verdicts(text: str) -> list[dict[str, Any]]:
    """Return the verdicts in the output, which may begin with log lines."""
    found: list[dict[str, Any]] = json.loads(text[text.index("[\n") : text.rindex("]") + 1])
    return found


def main(arguments: list[str]) -> int:
    """Print the table; return 1 if a liar survives, or was skipped everywhere."""
    rows: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        device, _, file = argument.partition("=")
        for verdict in verdicts(Path(file).read_text(encoding="utf-8")):
            if rows.get(verdict["liar"], {"verdict": "skipped"})["verdict"] == "skipped":
                rows[verdict["liar"]] = verdict | {"device": device}
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name, row in sorted(rows.items(), key=lambda item: int(item[1]["guarantee"][1:])):
        module = by_name(name).how.__module__.rpartition(".")[2]
        killed = f"`{row['by'].partition('[')[0]}`" if row["verdict"] == "killed" else f"**{row['verdict']}**"
        knew = "no" if module in UNSEEN and name not in LATER else "yes"
        cells = row["guarantee"], name, module, row["device"], row["profile"], f"{row['seconds']:.1f}", killed, knew
        print(f"| {' | '.join(cells)} |")
    seconds = [row["seconds"] for row in rows.values()]
    told = Counter((row["device"], row["verdict"], row["profile"]) for row in rows.values())
    counts = ", ".join(f"{count} {' '.join(what)}" for what, count in told.items())
    print(f"\n{len(rows)} liars: {counts};")
    print(f"{sum(seconds):.0f} s together, the median {statistics.median(seconds):.1f} s")
    return 0 if all(row["verdict"] == "killed" for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
