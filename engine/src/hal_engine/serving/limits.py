"""What a server takes at once: shares of this machine's descriptors and memory."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_MOST_CONNECTIONS = 16_384
_LEAST_BYTES, _MOST_BYTES = 16 << 20, 1 << 30
_SHARE = 128
"""Of the memory, the share that requests may hold is one in so many."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """``connections``: most of them at once; ``bytes``: of all requests that have no whole answer yet, together."""

    connections: int
    bytes: int

    @classmethod
    def of_machine(cls) -> Limits:
        """Return three of four descriptors of this process, and a 128th of the memory (16 MiB to 1 GiB)."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = 2 * _MOST_CONNECTIONS
        connections = max(1, min(_MOST_CONNECTIONS, descriptors * 3 // 4))
        return cls(connections=connections, bytes=max(_LEAST_BYTES, min(_MOST_BYTES, _memory() // _SHARE)))

    @property
    def burst(self) -> int:
        """How many connections may be accepted before the first of them is counted: within the last descriptors."""
        return max(1, min(2048, self.connections // 24))


def _memory() -> int:
    """Return the bytes of memory that this process can have."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(limit)
    if _CGROUP.exists() and (text := _CGROUP.read_text(encoding="ascii").strip()).isdecimal():  # else "max"
        found.append(int(text))
    return min(found)
