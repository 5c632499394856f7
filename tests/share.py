"""The split of work between ``make test`` and ``make conform``: examples of properties, and cases of long lists.

``make test`` has a share of examples and draws, and ``make conform`` all of them: it sets ``HAL_TEST_SHARE=1`` for
properties and tests marked ``drawn``. Some cases are in ``make test``, the remaining ones are marked ``conform``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHARE = float(os.environ.get("HAL_TEST_SHARE", "1"))
"""Of the examples that are written beside each property. The repository's ``conftest.py`` sets the default share."""
LEAST = 5
"""Examples that each has at least."""


def of(count: int, least: int = LEAST) -> int:
    """The examples of a property that has ``count`` in full."""
    return min(count, max(least, round(count * SHARE)))


def cases(values: Iterable[Any], here: Callable[[Any], object]) -> list[Any]:
    """For ``parametrize``: cases with a true ``here`` are in ``make test``, all remaining ones in ``make conform``.

    A tuple is several arguments.
    """
    left = pytest.mark.conform
    return [
        one if here(one) else pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=left) for one in values
    ]
