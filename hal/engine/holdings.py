"""Slots and KV blocks of one worker: free, held, or given back and still read by a step that is under way (G28)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .blocks import BlockPool


class Holdings:
    """Who leaves gives a slot and blocks back; they are free once the last step that reads them was taken.

    - ``pool``: the blocks; ``slots``: the free slots, the next one to be used last.
    - ``launched``, ``taken``: how many steps were scheduled, and of how many the output was taken, in their order.
    """

    def __init__(self, slots: int, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.slots = list(range(slots - 1, -1, -1))
        self.launched = self.taken = 0
        self._leaving: deque[tuple[int, int, list[int]]] = deque()

    @property
    def returning(self) -> int:
        """Blocks that are free once every step that was launched is taken."""
        return sum(len(blocks) for _, _, blocks in self._leaving)

    def give_back(self, slot: int, blocks: Sequence[int]) -> None:
        """A request leaves: every step that was launched so far may read its slot and blocks."""
        self._leaving.append((self.launched, slot, list(blocks)))
        self._free()

    def took(self) -> None:
        """The output of the oldest step under way was taken: its event has passed."""
        self.taken += 1
        self._free()

    def _free(self) -> None:
        while self._leaving and self._leaving[0][0] <= self.taken:
            _, slot, blocks = self._leaving.popleft()
            self.slots.append(slot)
            self.pool.release(blocks)
