"""Turns of the event loop: they bound the time that many requests take at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Resumes ``few`` tasks in each iteration of the loop, in the order in which they ask; between iterations running
    answers get their tokens. A task waits only if as many have asked in the same iteration. If many wait, one in
    ``among`` is resumed, which bounds the wait; 0: ``few`` all the same."""

    def __init__(self, few: int, among: int = 0) -> None:
        self._few, self._among, self._waiting = few, among, deque[asyncio.Future[None]]()
        self._taken = self._next = 0  # in this iteration, and in the next one
        self._is_posted = False

    async def take(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if not self._is_posted:
            self._is_posted = True
            loop.call_soon(self._go_round, loop)
        if self._taken < self._few and not (self._next or self._waiting):
            self._taken += 1
            return
        self._waiting.append(mine := loop.create_future())
        await mine

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken, self._next = self._next, 0
        most = max(self._few, len(self._waiting) // self._among if self._among else 0)
        while self._waiting and self._next < most:
            if not (first := self._waiting.popleft()).done():  # else its task was cancelled
                first.set_result(None)  # it runs in the next iteration
                self._next += 1
        self._is_posted = bool(self._taken or self._next)
        if self._is_posted:
            loop.call_soon(self._go_round, loop)
