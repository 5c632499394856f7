"""Runs the kit in a separate process for tests, and reads its report."""

import json
from pathlib import Path

HANGS = 900
"""Seconds after which a run of the kit counts as hung, on a busy machine."""
LIBRARIES = ("numpy", "hypothesis.stateful", "pytest")
LIBRARIES += ("hal_conformance.report.command", "hal_conformance.report.supervisor")
"""Modules that each run of the kit imports before pytest runs: it is a fork of one process that has imported them."""
HERE = Path(__file__).parent
RUN_MODULE = "import runpy, sys; name = sys.argv.pop(1); runpy.run_module(name, run_name='__main__', alter_sys=True)"


def summary(printed):
    """Summarize the output of a run; of a report as data, the tests that did not pass."""
    if not printed.startswith("{"):
        return printed[-4000:]
    tests = [test for one in json.loads(printed)["guarantees"] for test in one["tests"]]
    return "\n\n".join(f"{one['test']}: {one['error']}" for one in tests if one["outcome"] not in ("passed", "skipped"))


def entry(found, name):
    return next(one for one in found["guarantees"] if one["guarantee"] == name)


def outcomes(found, name):
    return {test["test"]: test["outcome"] for test in entry(found, name)["tests"]}
