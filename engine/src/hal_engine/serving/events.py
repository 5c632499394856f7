"""A response of server-sent events, which are made and written as parts of answers come: in the call that brings a
part, without a task. An event's bytes are made once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from datetime import UTC, datetime
from types import coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hal_engine.generation import Part
from hal_engine.streams import joined
from hal_engine.timeouts import TIMEOUTS

from .answers import Answers
from .drain import Drain
from .errors import error_object, error_of
from .schemas import StreamOptions
from .shapes import Shape, usage_of

WRITE = "hal.write"
"""Key of a scope: :meth:`hal_engine.serving.connection.Connection.write_part`; other servers have none."""
SERVERS_SEND = "hal.send"
"""Key of a scope: the server's own ``send``. What middlewares put around it costs each event a call for each of them,
and they look at the head alone."""
_HEADERS = {"cache-control": "no-store", "connection": "keep-alive", "x-accel-buffering": "no"}
_encode = msgspec.json.Encoder().encode
_MARK = "\x00"
_MARKED = _encode(_MARK)[1:-1]


class Events(Response):
    """The events of ``answers``, the last of which is ``[DONE]``, or an error object.

    While the connection takes no bytes no event is made, and the parts of each choice are joined: the server keeps one
    write and the rest of the text of a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, shape: Shape, options: StreamOptions, drain: Drain) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS)
        self._answers, self._shape, self._options, self._drain = answers, shape, options, drain
        self._tokens, self._begun = 0, set[int]()
        self._around = dict[int, tuple[bytes, bytes]]()  # of a choice: a plain event's bytes before and after its text
        self._is_busy = True  # the head is not sent, or the connection takes no bytes
        self._is_over = False  # the last event was made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        loop = asyncio.get_running_loop()
        self._send, self._ended = scope.get(SERVERS_SEND, send), loop.create_future()
        self._write_part = scope.get(WRITE)
        gone = asyncio.create_task(left(receive))
        gone.add_done_callback(lambda _: self._end())
        self._pings = loop.call_later(TIMEOUTS.ping, self._ping)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._is_busy = False
            with self._drain.watched_by(self._cut):
                self._answers.listen(self._flush, self._write_usual)
                self._flush()
                await self._ended
        finally:
            self._is_busy = self._is_over = True
            self._pings.cancel()
            gone.cancel()
            self._answers.close()

    def _flush(self) -> None:
        """Write the parts that have come, unless the connection takes no bytes. Never raises: others are next."""
        if self._is_busy or self._is_over:
            return
        try:
            self._write(self._made())
        except Exception as error:  # noqa: BLE001 (the response raises it)
            self._end(error)

    def _made(self) -> bytes:
        """Return the events of all that has come."""
        events: list[bytes] = []
        answers = self._answers
        for index, parts in answers.take().items():
            self._add(events, index, parts[0] if len(parts) == 1 else joined(parts))
        if answers.error is not None:
            self._drain.count(answers.error)
            events.append(_event(error_object(error_of(answers.error))))
            answers.close()
            self._is_over = True
        elif not answers.left:
            if self._options.include_usage:
                usage = usage_of(answers.wanted.prompt_tokens, self._tokens)
                events.append(_event(_encode(self._shape.event([], usage))))
            events.append(b"data: [DONE]\n\n")
            self._is_over = True
        return events[0] if len(events) == 1 else b"".join(events)

    def _usual(self, index: int, part: Part) -> bytes | None:
        """Return the event of a part that is text alone; None for any other part, and for a choice's first one."""
        around = self._around.get(index)
        if around is None or part.finish_reason is not None or part.logprobs:
            return None
        self._tokens += len(part.token_ids)
        return around[0] + _encode(part.text)[1:-1] + around[1] if part.text else b""

    def _write_usual(self, part: Part) -> bool:
        """Write the part of a lone choice, if nothing waits and it is a usual one; return whether it was. Raises
        nothing."""
        if self._is_busy or self._is_over:
            return False
        try:
            if (event := self._usual(0, part)) is None:
                return False
            self._write(event)
        except Exception as error:  # noqa: BLE001 (the response raises it)
            self._end(error)
        return True

    def _add(self, events: list[bytes], index: int, part: Part) -> None:
        if (event := self._usual(index, part)) is not None:
            events += [event] if event else []
            return
        self._tokens += len(part.token_ids)
        if index not in self._begun:
            self._begun.add(index)
            if (opening := self._shape.opening(index)) is not None:
                events.append(_event(_encode(self._shape.event([opening]))))
        usage = None
        if self._options.continuous_usage_stats:
            usage = usage_of(self._answers.wanted.prompt_tokens, self._tokens)
        elif index not in self._around:
            marked = _event(_encode(self._shape.event([self._shape.piece(index, Part(_MARK, ()))])))
            before, _, after = marked.partition(_MARKED)
            self._around[index] = before, after
        if part.text or part.logprobs or part.finish_reason is not None:
            events.append(_event(_encode(self._shape.event([self._shape.piece(index, part)], usage))))

    def _write(self, data: bytes) -> None:
        """Send in this call. The server's ``send`` waits for nothing unless the connection takes no bytes: then a task
        waits for that."""
        if not data or (not self._is_over and self._write_part is not None and self._write_part(data)):
            return
        running = self._send({"type": "http.response.body", "body": data, "more_body": not self._is_over})
        try:
            wait = running.send(None)
        except StopIteration:
            if self._is_over:
                self._end()
            return
        self._is_busy = True
        asyncio.create_task(_rest(running, wait)).add_done_callback(self._written)

    def _written(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or self._is_over or error is not None:
            self._end(error)
            return
        self._is_busy = False
        self._flush()

    def _cut(self) -> None:
        """End with an error, as the drain is over. A connection that takes no bytes has some seconds for it."""
        asyncio.get_running_loop().call_later(TIMEOUTS.last_event, self._end)
        if self._answers.left:
            self._answers.error = self._answers.error or self._drain.error()
            self._flush()

    def _ping(self) -> None:
        self._pings = asyncio.get_running_loop().call_later(TIMEOUTS.ping, self._ping)
        if not (self._is_busy or self._is_over):
            self._write(f": ping - {datetime.now(UTC)}\n\n".encode())

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


async def left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _rest(running: Coroutine[Any, Any, None], wait: object) -> None:
    """Do the rest of a begun response, whose first wait is ``wait``."""

    @coroutine
    def rest() -> Generator[Any, None, None]:
        yield wait
        yield from running

    await rest()


def _event(data: bytes) -> bytes:
    return b"data: %s\n\n" % data
