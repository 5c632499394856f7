"""A model served on a GPU, measured by commands that run alone, and merged.

    python -m benchmarks.report hooks|decode|prefill|contexts|arrivals|serve OUT.json  # at most 6 minutes each
    python -m benchmarks.report merge IN.json ...                          # prints the page

They need torch, the cuda plugin and the torch runner, and ``serve`` what ``hal serve`` needs; no Paddle. ``--tiny``
takes a small model, on a machine without a GPU too, as a check without measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any


def measured(kind: str, *, tiny: bool, seconds: float, rounds: int, only: str) -> dict[str, Any]:
    """Results of a command."""
    if kind == "hooks":
        from . import hooks

        return hooks.measure(stand_in=tiny)
    if kind == "decode":
        from . import decode

        return decode.measure([("tiny", (4,))], 1, only) if tiny else decode.measure(rounds=rounds, only=only)
    if kind == "prefill":
        from . import prefill

        return prefill.measure()
    if kind == "contexts":
        from . import contexts

        return contexts.measure(tiny=tiny, chunks=[int(one) for one in only.split(",") if one])
    if kind == "serve":
        from . import served

        return served.measure((("tiny", 4, 2),)) if tiny else served.measure()
    from . import arrivals

    return arrivals.measure("tiny", 4, seconds) if tiny else arrivals.measure(seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("hooks", "decode", "prefill", "contexts", "arrivals", "serve", "merge"))
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="long or short answers of decode; chunks of contexts, as 1024,2048")
    chosen = parser.parse_args()
    if chosen.kind == "merge":
        from .merge import merged

        print(merged(chosen.files))
        return 0
    from benchmarks.gpu.facts import facts

    begin = time.perf_counter()
    found = measured(chosen.kind, tiny=chosen.tiny, seconds=chosen.seconds, rounds=chosen.rounds, only=chosen.only)
    report = {"kind": chosen.kind, "facts": facts("benchmarks.report"), "took_s": time.perf_counter() - begin} | found
    chosen.files[0].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    from .merge import merged

    print(merged(chosen.files[:1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
