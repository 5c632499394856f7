"""The sizes past those of the other tables, and the guarantees that are checked at each: both sides of the numbers at
which a device may change its method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from ..kit import Kit

MIB = 1 << 20
GREAT = 1 << 31
"""Bytes from which a size is of the profiles default and nightly alone."""


class Size(NamedTuple):
    """Counts or bytes of one kind. ``quick``: those of the profile quick."""

    guarantees: tuple[int, ...]
    quick: tuple[int, ...]
    further: tuple[int, ...] = ()


def around(*powers: int) -> tuple[int, ...]:
    """Return both sides of powers of two, and the powers."""
    return tuple((1 << power) + off for power in powers for off in (-1, 0, 1))


SIZES = {
    "bytes of a value": Size((5,), around(8, 12, 16, 20, 22)),
    "bytes of a fill": Size((6,), (8 * MIB - 1, 8 * MIB, 8 * MIB + 1), (16 * MIB + 1, 32 * MIB + 1)),
    "bytes of an upload under way": Size((1,), (32 * MIB,), (4 * MIB, 64 * MIB)),
    "requests of a batch": Size((9,), (1, 8, 9, 64, 65, 257, 1025), around(8, 10, 11)),
    "requests of a batch that is counted": Size((10,), (1, 65, 130, 1025), (512, 1024, 2049)),
    "copies whose arrays are kept": Size((1, 22), (1100,), (4200,)),
    "calls until a stream's queue is full": Size((3,), (1300,), (5000,)),
    "tokens or blocks that a row shares with another": Size((9, 11), (40,), (300,)),
    "calls of which none keeps memory": Size((26,), (2_000,), (10_000,)),
    "bytes of a state that steps": Size((9,), (), (GREAT + 1,)),
}
"""Each test named by its guarantees runs at these; docs/conformance.md has them beside the older ones."""


def sizes(kit: Kit, what: str) -> tuple[int, ...]:
    """Return the sizes of the run's profile, from the smallest; skip the test if it has none."""
    one = SIZES[what]
    found = one.quick if kit.effort.profile == "quick" else tuple(sorted({*one.quick, *one.further}))
    if not found:
        pytest.skip(f"{what}: past 2 GiB in the profiles default and nightly alone")
    return found


def available() -> int:
    """Return the bytes of memory that this machine has available; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


def need(nbytes: int, what: str) -> None:
    """Skip the test where the machine has not twice so much memory to give."""
    if available() < 2 * nbytes:
        pytest.skip(f"needs {2 * nbytes >> 30} GiB of free memory, to be safe with {what} of {nbytes >> 30} GiB")
