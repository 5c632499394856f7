"""Turns of the event loop: what a request costs at a time is bounded, however many come at once."""

from __future__ import annotations

import asyncio
from collections import deque

MOST = 4
"""Turns in a round of the loop: some milliseconds at most, less than a step of a large model."""


class Turns:
    """Lets few tasks go on each time that the loop goes round, in the order in which they ask: between rounds the
    answers of others get their tokens. A task that asks before few others goes on at once."""

    def __init__(self) -> None:
        self._waiting = deque[asyncio.Future[None]]()
        self._taken = 0  # in this round

    async def take(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if self._taken < MOST:
            self._count(loop)
            return
        self._waiting.append(mine := loop.create_future())
        await mine

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._taken:
            loop.call_soon(self._go_round, loop)
        self._taken += 1

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._taken = 0
        while self._waiting and self._taken < MOST:
            if not (first := self._waiting.popleft()).done():  # else its task was cancelled
                first.set_result(None)
                self._count(loop)
