"""Turns of the event loop: what a request costs at a time is bounded, however many come at once."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one task go on each time that the loop goes round, in the order in which they ask: between two of them
    the answers of others get their tokens. A task that asks alone goes on at once."""

    def __init__(self) -> None:
        self._waiting = deque[asyncio.Future[None]]()
        self._is_taken = False  # in this round

    async def take(self) -> None:
        """Wait for a turn."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._go_round, loop)
            return
        self._waiting.append(mine := loop.create_future())
        await mine

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            if not (first := self._waiting.popleft()).done():  # else its task was cancelled
                first.set_result(None)
                self._is_taken = True
                loop.call_soon(self._go_round, loop)
