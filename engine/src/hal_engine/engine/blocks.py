"""Pool of physical KV blocks, which assigns parts of the paged cache to requests."""

from __future__ import annotations

from collections.abc import Iterable

from hal_core import HalError, InvalidValue, OutOfMemory


class BlockPool:
    """Block ids 0 to ``size`` - 1, each free or held by one request. Freed blocks are used again first."""

    def __init__(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidValue(f"{size!r} blocks", cure="give a whole number of at least 1", argument="blocks")
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._held = bytearray(size)

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks. Raises :class:`OutOfMemory` if fewer are free, and takes none then."""
        if count < 0:
            raise InvalidValue(f"{count} blocks", cure="give no negative count", argument="count")
        if count > len(self._free):
            raise OutOfMemory(
                f"{count} blocks wanted, {len(self._free)} of {self.size} free",
                cure="free some, or make the pool larger",
            )
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for block in taken:
            self._held[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Return blocks to the pool. Raises :class:`HalError` for a block that is free or unknown, and returns none
        then."""
        given = list(blocks)
        wrong = [block for block in given if not 0 <= block < self.size or not self._held[block]]
        if wrong or len(set(given)) != len(given):
            raise HalError(f"blocks {wrong or given} are not held, or named twice", cure="free each block once")
        for block in given:
            self._held[block] = 0
        self._free.extend(reversed(given))
