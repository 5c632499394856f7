"""The end of a server: its requests have some seconds, then each of them ends with an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import ApiError


class Drain:
    """The seconds that requests have once the server stops; ``cut``: how many ended with an error after them."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.cut = seconds, 0
        self._waits = set[asyncio.Timeout]()
        self._over = False

    def begin(self) -> None:
        """Let the seconds begin. Call it in the event loop."""
        asyncio.get_running_loop().call_later(self.seconds, self._end)

    def _end(self) -> None:
        self._over, now = True, asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)

    @asynccontextmanager
    async def bound(self) -> AsyncIterator[None]:
        """Inside, a wait that outlasts the seconds is cancelled, and the block ends with :class:`ApiError`."""
        try:
            async with asyncio.timeout(0.0 if self._over else None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if not wait.expired():
                raise
            self.cut += 1
            what = f"the server is stopping, and its --drain of {self.seconds:g} s is over"
            raise ApiError(503, f"{what} (send the request again later)", code="server_stopping") from error
