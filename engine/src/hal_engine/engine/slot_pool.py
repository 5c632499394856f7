"""Slots and KV blocks of one worker: free, held, or released while a step in flight still reads them."""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import BlockPool


class SlotPool:
    """Slots and blocks of a worker. A request that leaves releases its own.

    They are free at once if their next user writes them on the stream of the steps, after those that read them (G28).
    Otherwise they are free once the last step that reads them was taken.

    - ``pool``: the blocks; ``slots``: the free slots, the next one to be used last.
    - ``launched``, ``taken``: how many steps were scheduled, and of how many the output was taken, in their order.
    """

    def __init__(self, slots: int, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.slots = list(range(slots - 1, -1, -1))
        self.launched = self.taken = 0
        self._leaving: list[tuple[int, int, list[int]]] = []

    @property
    def returning(self) -> int:
        """Blocks that are free once every launched step is taken."""
        return sum(len(blocks) for _, _, blocks in self._leaving)

    def give_back(self, slot: int, blocks: Sequence[int], *, at_once: bool = False) -> None:
        """Release a request's slot and blocks, which every launched step may read. ``at_once``: they are free all the
        same, because the next write to them follows those steps."""
        self._leaving.append((self.taken if at_once else self.launched, slot, list(blocks)))
        self._free()

    def took(self) -> None:
        """Take the output of the oldest step in flight: its event has passed."""
        self.taken += 1
        self._free()

    def _free(self) -> None:
        free = [left for left in self._leaving if left[0] <= self.taken]
        for left in free:
            self._leaving.remove(left)
            self.slots.append(left[1])
            self.pool.release(left[2])
