"""How many examples a property gets: a share in ``make test``, all in ``make conform`` (``HAL_TEST_SHARE=1``)."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("HAL_TEST_SHARE", "0.4"))
"""Of the examples that are written beside each property."""
LEAST = 5
"""Examples that each has at least."""


def of(count: int) -> int:
    """The examples of a property that has ``count`` in full."""
    return min(count, max(LEAST, round(count * SHARE)))
