"""Where the decode gap comes from: hal's turns with one thing changed or left out, in turn, on one GPU.

    python -m benchmarks.gpu.whence [--rounds 3] [--steps 90] [--out docs/evidence]

Gaps in ms by the GPU's clock, medians over the rounds of each run's mean; 16 requests of 1,024 tokens enter a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from .gap import FUSED, MANNERS, NOTHING, OURS, Loop, alone
from .rig import Rig, median

AHEAD, EARLY = "hal, batch made ahead", "hal, inserted ahead"
LOOKING, ENGINE = "the event looked at in a loop", "the output by the copy engine, beside the compute stream"
CHANGES = (LOOKING, ENGINE)
"""Changes of hal itself."""


@contextmanager
def changed(rig: Rig, what: str) -> Iterator[None]:
    """hal with one of its decisions changed."""
    if what == ENGINE:  # in place of a kernel of the compute stream
        from hal_cuda import copies

        with patch.object(copies, "BY_KERNEL", -1):
            yield
        return
    if what == LOOKING:  # in place of the driver's wait
        pool: Any = rig.device.device.events
        waits, query = pool.synchronize, pool.query

        def look(raw: Any, timeout: float | None) -> bool:  # noqa: ANN401
            while not query(raw):
                pass
            return True

        pool.synchronize = look
        try:
            yield
        finally:
            pool.synchronize = waits
        return
    yield


def measure(rig: Rig, rounds: int, steps: int, only: str = "") -> list[dict[str, Any]]:
    """Every manner, waiting and overlapped; then hal with a decision changed; the order turns with the round.

    ``only``: of what is changed, and hal itself beside it.
    """
    loop = Loop(rig, alone)
    cases: list[tuple[str, str, bool]] = []
    for waits in (True, False):
        ways = [*MANNERS, FUSED, NOTHING]
        cases += [(way, "", waits) for way in ways if waits or way not in (AHEAD, EARLY)]
        cases += [(AHEAD if waits else OURS, what, waits) for what in CHANGES if waits or what != LOOKING]
    if only:
        beside = (OURS, AHEAD, FUSED, NOTHING)
        cases = [case for case in cases if (only in case[1] if case[1] else case[0] in beside)]
    found: dict[tuple[str, str, bool], list[dict[str, Any]]] = {case: [] for case in cases}
    for way in dict.fromkeys(case[0] for case in cases):
        loop.run(way, 1.0, 16, waits=True, steps=12)
    for number in range(rounds):
        at = number * len(cases) // rounds
        for case in cases[at:] + cases[:at]:
            way, what, waits = case
            with changed(rig, what):
                found[case].append(loop.run(way, 5.0, 16, waits=waits, steps=steps))
    return [_row(case, rows) for case, rows in found.items()]


def _row(case: tuple[str, str, bool], rows: list[dict[str, Any]]) -> dict[str, Any]:
    way, what, waits = case
    parts = {name: median([row["host_parts_us"][name] for row in rows]) for name in rows[0]["host_parts_us"]}
    return {
        "way": f"{way}; {what}" if what else way,
        "mode": "waits" if waits else "overlapped",
        "gap_mean_ms": round(float(np.median([row["gap_mean_ms"] for row in rows])), 4),
        "gap_median_ms": round(float(np.median([row["gap_ms"] for row in rows])), 4),
        "means_ms": [row["gap_mean_ms"] for row in rows],
        "host_parts_us": parts,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As text."""
    lines = [f"{'5 ms steps, ms':84}{'mean':>8}{'median':>8}"]
    for row in rows:
        lines.append(f"{row['mode']:11} {row['way']:72}{row['gap_mean_ms']:8.4f}{row['gap_median_ms']:8.4f}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table, write ``gpu-whence.json`` and ``.txt``."""
    from .bench import facts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--device-index", type=int, default=0)
    parser.add_argument("--only", default="", help="a word of what is changed")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    chosen = parser.parse_args()
    rows = measure(Rig.open(chosen.device_index), chosen.rounds, chosen.steps, chosen.only)
    found = {"facts": facts(), "rounds": chosen.rounds, "steps": chosen.steps, "rows": rows}
    found["facts"]["command"] = f"python -m benchmarks.gpu.whence {' '.join(sys.argv[1:])}".strip()
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "gpu-whence.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = f"{found['facts']['date']}  {found['facts']['gpus']}  {found['facts']['versions']}\n{table(rows)}\n"
    (chosen.out / "gpu-whence.txt").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
