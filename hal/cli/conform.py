"""``hal conform NAME``: whether a device keeps the contract. The kit is the core's own; this only calls it."""

from __future__ import annotations

import sys


def run(arguments: list[str]) -> None:
    """Run the conformance kit and exit with its status; ``hal conform --help`` lists the options."""
    from hal_core.conformance.command import main  # with pytest and NumPy behind it

    sys.exit(main(arguments))
