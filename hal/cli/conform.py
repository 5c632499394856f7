"""``hal conform NAME``: check that a device keeps the contract. The kit does the checking; this module finds the
device.

A device that hal would not open is not tested: one outside the allow-list, or one made for another contract version.
"""

from __future__ import annotations

import sys

from . import failures, signals

_OPTIONS = (
    "replay",
    "only",
    "profile",
    "examples",
    "seed",
    "hang",
    "liar",
    "fault",
    "policy",
    "fields",
    "device-factory",
    "report",
    "skip",
)
TYPED = {"name": "NAME", "device": "NAME"} | {option.replace("-", "_"): f"--{option}" for option in _OPTIONS}
"""Inner argument names, mapped to the options as the user types them."""


def run(arguments: list[str]) -> None:
    """Run the conformance kit and exit with its status; ``hal conform --help`` lists the options."""
    from hal_conformance import main  # imports NumPy

    failures.verbose = True
    with signals.noted():
        status = main(arguments, find=_find, came=signals.came)
        sys.stdout.flush()  # after a signal unwritten output is lost, and the report has been printed
    signals.check()
    sys.exit(status)


def _find(name: str) -> str:
    """Entry point of a device, found as hal finds it everywhere else."""
    from hal.selection import select

    return select(name).entry.target
