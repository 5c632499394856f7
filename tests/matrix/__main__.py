"""The whole matrix: ``python -m tests.matrix [--pairwise] [--part I/N] [--only WORDS]``.

Without Ray its rows are counted and left out.

Every row must give the tokens of the plain run, greedy and seeded, with log-probabilities within 1e-4. Failures are
printed with their row, the remaining rows run, and the status is then 1.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from importlib.util import find_spec

from tests.matrix.rows import all_rows, pairwise
from tests.matrix.runs import check, missing, run, worlds


def part_of(text: str) -> tuple[int, int]:
    """``"2/3"`` as (2, 3)."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text}: give a part like 1/3")
    return int(number), int(of)


def main() -> int:
    """Run the rows that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairwise", action="store_true", help="rows that show every pair of values")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    chosen = parser.parse_args()
    rows = [row for row in (pairwise() if chosen.pairwise else all_rows()) if chosen.only in row.name]
    number, of = chosen.part
    size = -(-len(rows) // of)
    rows = sorted(rows, key=lambda row: (row.launcher, row.ranks, row.device == "maca"))[
        (number - 1) * size : number * size
    ]
    out = sys.stdout  # which is Ray's while its cluster runs
    left_out = [row for row in rows if row.launcher == "ray"] if find_spec("ray") is None else []
    rows = [row for row in rows if row not in left_out]
    failed, began = 0, time.monotonic()
    with worlds() as made:
        for row in rows:
            start = time.monotonic()
            if why := missing(row):
                print(f"skipped {row.name}: {why}", flush=True)
                continue
            try:
                found = run(row, made)
                check(row, found)
                fed, accepted, _ = found.drafts
                print(
                    f"ok    {row.name}: {accepted} of {fed} drafts, {time.monotonic() - start:.1f} s",
                    flush=True,
                    file=out,
                )
            except Exception:  # noqa: BLE001 (told, and counted)
                failed += 1
                print(f"WRONG {row.name}\n{traceback.format_exc()}", flush=True, file=out)
                made.end(row)
    if left_out:
        print(f"{len(left_out)} rows on Ray are left out: it is not installed (make .venv/.ray)", file=out)
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s, {failed} wrong", file=out)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
