"""``hal conform NAME``: whether a device keeps the contract. The kit is the core's own; this only calls it."""

from __future__ import annotations

import sys

from . import signals


def run(arguments: list[str]) -> None:
    """Run the conformance kit and exit with its status; ``hal conform --help`` lists the options."""
    from hal_core.conformance import main  # with pytest and NumPy behind it

    with signals.raised(KeyboardInterrupt):  # pytest's own word for it, after which it tells what it has and tidies up
        status = main(arguments, [_Between()])
    signals.check()
    sys.exit(status)


class _Between:
    """A pytest plugin that ends the run after a signal that a test has taken for a failure of what it tests."""

    def pytest_runtest_logstart(self) -> None:
        """A test would begin."""
        if signals.came() is not None:
            raise KeyboardInterrupt
