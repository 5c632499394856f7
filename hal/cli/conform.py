"""``hal conform NAME``: whether a device keeps the contract. The kit is the core's own; this finds the device for it.

What hal would not open is not tested either: a plugin that the allow-list leaves out, or one made for another contract.
"""

from __future__ import annotations

import sys

from . import failures, signals

_OPTIONS = ("only", "profile", "examples", "seed", "liar", "fault", "policy", "fields", "device-factory", "report")
TYPED = {"name": "NAME", "device": "NAME"} | {option.replace("-", "_"): f"--{option}" for option in _OPTIONS}
"""Inner arguments that errors name, as the user types them."""


def run(arguments: list[str]) -> None:
    """Run the conformance kit and exit with its status; ``hal conform --help`` lists the options."""
    from hal_conformance import main  # with pytest and NumPy behind it

    failures.verbose = True
    with signals.raised(KeyboardInterrupt):  # pytest's own word for it, after which it tells what it has and tidies up
        status = main(arguments, [_Between()], _find)
        sys.stdout.flush()  # after a signal what is not written is lost, and pytest has told what it has
    signals.check()
    sys.exit(status)


def _find(name: str) -> str:
    """The entry point of a device, as hal finds it for everything else."""
    from hal.selection import select

    return select(name).entry.target


class _Between:
    """A pytest plugin that ends the run after a signal that a test has taken for a failure of what it tests."""

    def pytest_runtest_logstart(self) -> None:
        """A test would begin."""
        if signals.came() is not None:
            raise KeyboardInterrupt
