"""What the kernel says of a process's share of the processors."""

from __future__ import annotations

import contextlib
from pathlib import Path


def kept_waiting(pid: int) -> float:
    """Return the seconds in which a process could run and had no processor, which a busy machine causes; 0 of one that
    has ended."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0
