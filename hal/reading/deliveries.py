"""Per-request streams: the rows of one request, taken out of the records of all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator

from hal_core import FinishReason, InvalidValue, OutputRow, TicketTimeout

from hal.reading.reader import OutputReader


class RequestStreams:
    """Spreads a reader's records over streams, one a request. Open a stream before its request is admitted.

    Rows of requests without a stream are counted in ``unclaimed`` and dropped. All streams read from the one reader
    in turn, so either one thread iterates them, or the tasks of one event loop do.
    """

    def __init__(self, reader: OutputReader, *, timeout: float | None = None) -> None:
        self.unclaimed = 0
        self._reader, self._timeout = reader, timeout
        self._rows: dict[str, deque[OutputRow]] = {}
        self._turn = asyncio.Lock()

    def open(self, request_id: str) -> None:
        """Keep the rows of this request from now on. Raises InvalidValue if it has a stream already."""
        if request_id in self._rows:
            raise InvalidValue(f"request {request_id!r} has a stream already", argument="request_id")
        self._rows[request_id] = deque()

    def close(self, request_id: str) -> None:
        """Drop the request's rows, those to come too. A stream that has given its last row is closed already."""
        self._rows.pop(request_id, None)

    def stream(self, request_id: str) -> Iterator[OutputRow]:
        """Give the request's rows up to the one that finishes it."""
        rows = self._opened(request_id)
        while True:
            while not rows:
                frame = self._reader.read(self._timeout)
                self._spread(request_id, frame and list(frame.record.rows()))
            row = rows.popleft()
            yield row
            if row.finish is not FinishReason.NONE:
                return self.close(request_id)

    async def stream_async(self, request_id: str) -> AsyncIterator[OutputRow]:
        """As :meth:`stream`, for a task of an event loop."""
        rows = self._opened(request_id)
        while True:
            while not rows:
                async with self._turn:
                    if not rows:  # another task may have read it meanwhile
                        frame = await self._reader.read_async(self._timeout)
                        self._spread(request_id, frame and list(frame.record.rows()))
            row = rows.popleft()
            yield row
            if row.finish is not FinishReason.NONE:
                self.close(request_id)
                return

    def _opened(self, request_id: str) -> deque[OutputRow]:
        if request_id not in self._rows:
            self.open(request_id)
        return self._rows[request_id]

    def _spread(self, waiting: str, rows: list[OutputRow] | None) -> None:
        if rows is None:
            raise TicketTimeout(
                f"no output for request {waiting!r} within {self._timeout} s, or every sender has ended",
                cure="see whether the worker runs, or raise timeout",
            )
        for row in rows:
            if row.request_id in self._rows:
                self._rows[row.request_id].append(row)
            else:
                self.unclaimed += 1
