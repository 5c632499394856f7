"""Run the tests of every guarantee alone, each in a process of its own, and print the results as a table.

    python tools/each_guarantee.py cpu sim opencl queue           G1 to G32, profile quick
    python tools/each_guarantee.py cpu --only G3,G15 --busy       two of them, beside one busy process a core

``queue`` is the asynchronous example. A cell has the tests that passed, those that were skipped in brackets, and the
seconds of processor time, which a busy machine does not change much. The status is 1 if a test failed or was not run;
its report is printed then.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from hal_conformance.harness.guarantees import GUARANTEES
from hal_conformance.report.apart import Say, apart
from hal_conformance.report.command import main as conform
from hal_conformance.report.report import chosen
from steady import busy

ROOT = Path(__file__).resolve().parents[1]
FACTORIES = {"queue": "queued_device:queued"}
"""Devices without an entry point, in ``conformance/tests``."""


def alone(device: str, number: int, more: list[str], say: Say) -> dict[str, Any]:
    """In a process of its own: return how the tests of a guarantee ended, and the seconds of processor time."""
    say(f"G{number} on {device}")
    named = [f"--device-factory={FACTORIES[device]}"] if device in FACTORIES else [device]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = conform([*named, f"--only=G{number}", "--json", *more])
    text = out.getvalue()
    tests = [test for one in json.loads(text)["guarantees"] for test in one["tests"]] if text.startswith("{") else []
    times = os.times()
    return {
        "status": status,
        "counts": Counter(test["outcome"] for test in tests),
        "told": [f"{test['test']}: {test['error']}\n{test['reproduce']}" for test in tests if test["error"]],
        "errors": errors.getvalue(),
        "seconds": times.user + times.system + times.children_user + times.children_system,
    }


def cell(found: dict[str, Any]) -> str:
    """Return a cell of the table."""
    counts = Counter(found["counts"])
    passed, skipped = counts.pop("passed", 0), counts.pop("skipped", 0)
    bad = "".join(f", **{count} {how}**" for how, count in counts.items())
    bad = bad or ("" if found["status"] == 0 else f", **status {found['status']}**")
    return f"{passed} ({skipped}){bad}, {found['seconds']:.0f} s"


def main(given: list[str] | None = None) -> int:
    """Print a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+")
    parser.add_argument("--only", default="", metavar="G3,G15", help="these guarantees; each is run alone all the same")
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--fault", default="", metavar="NAME", help="under one of the kit's faults")
    parser.add_argument("--busy", action="store_true", help="beside one busy process a core")
    options = parser.parse_args(given)
    sys.path.insert(0, str(ROOT / "conformance" / "tests"))
    more = [f"--profile={options.profile}", *([f"--fault={options.fault}"] if options.fault else [])]
    wanted = chosen(options.only) or {one.number for one in GUARANTEES}
    print(f"| guarantee | {' | '.join(options.devices)} |\n|---{'|---' * len(options.devices)}|", flush=True)
    failed = False
    with busy((os.cpu_count() or 1) if options.busy else 0):
        for number in sorted(wanted):
            cells = []
            for device in options.devices:
                ended = apart(partial(alone, device, number, more))
                found = ended.result or {"status": ended.why, "counts": {}, "told": [], "errors": "", "seconds": 0}
                cells.append(cell(found))
                if found["status"]:
                    failed = True
                    print("\n".join([f"G{number} on {device}:", *found["told"], found["errors"]]), file=sys.stderr)
            print(f"| G{number} | {' | '.join(cells)} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
