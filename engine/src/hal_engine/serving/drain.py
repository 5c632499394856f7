"""The end of a server: its requests have some seconds, then each of them ends with an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from .errors import ApiError

_CODE = "server_stopping"


class Drain:
    """The seconds that requests have once the server stops; ``cut``: how many ended with an error after them;
    ``has_begun``: whether the server stops."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.cut = seconds, 0
        self._waits, self._cuts = set[asyncio.Timeout](), set[Callable[[], object]]()
        self._over = self.has_begun = False

    def begin(self) -> None:
        """Let the seconds begin. Call it in the event loop."""
        self.has_begun = True
        asyncio.get_running_loop().call_later(self.seconds, self._end)

    def _end(self) -> None:
        self._over, now = True, asyncio.get_running_loop().time()
        for wait in self._waits:
            wait.reschedule(now)
        for cut in list(self._cuts):
            cut()

    @contextmanager
    def watched_by(self, cut: Callable[[], object]) -> Iterator[None]:
        """Inside, ``cut`` is called once the seconds are over."""
        self._cuts.add(cut)
        try:
            if self._over:
                asyncio.get_running_loop().call_soon(cut)
            yield
        finally:
            self._cuts.discard(cut)

    def error(self) -> ApiError:
        """Return what ends a request then."""
        what = f"the server is stopping, and its --drain of {self.seconds:g} s is over"
        return ApiError(503, f"{what} (send the request again later)", code=_CODE)

    def count(self, error: Exception) -> None:
        """A request has ended with an error; count it if it is the drain's."""
        self.cut += isinstance(error, ApiError) and error.code == _CODE

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
            raise self.error() from error
