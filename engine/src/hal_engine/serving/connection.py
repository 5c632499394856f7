"""One connection of a server: uvicorn's protocol, behind the :class:`Gate`."""

from __future__ import annotations

import asyncio
import http
import sys
from collections import deque
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError, error_response
from .events import WRITE
from .gate import Gate, Phase

_MOST_HEAD = 1 << 16
"""Bytes of a head, which the parser does not bound."""
_MOST_QUEUED = 16
"""Further requests that a client may send before the answer to its first one; neither does the parser bound those."""


class Connection(HttpToolsProtocol):
    """Reports to the gate each phase of the connection, and the bytes of its request.

    So the gate also counts connections that reach no ASGI application: silent ones, and those with half a head."""

    def __init__(self, *arguments: Any, gate: Gate, **options: Any) -> None:  # noqa: ANN401 (uvicorn's own)
        super().__init__(*arguments, **options)
        self._gate, self._begun = gate, False
        self._head, self._in_head = 0, False  # bytes of a head of which some have come
        self._data = b""  # what is parsed now
        self._cycles = deque[RequestResponseCycle]()  # without a whole answer; the first one is being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See :class:`asyncio.Protocol`."""
        super().connection_made(transport)
        self._gate.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._gate.leave(self)
        for cycle in self._cycles:  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self.transport.is_closing():
            return
        former, self._data = self.cycle, data
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._head = self._head + len(data) if self._in_head else 0
        if self._head > _MOST_HEAD:
            self.send_400_response(f"the head has more than {_MOST_HEAD} bytes")
            return
        if self.cycle is former and self._phase() is Phase.HEAD:
            if not self._begun:  # the time of a head begins with its first byte
                self._gate.now(self, Phase.HEAD)
            self._begun = True
            return
        self._look(again=self.cycle is not former)
        if not self.cycle.response_complete:
            self._gate.hold(self, len(data))

    def on_message_begin(self) -> None:
        """See uvicorn's protocol."""
        if len(self._cycles) > _MOST_QUEUED:
            raise ValueError("too many requests at once")  # the parser ends, as over what is no HTTP
        self._in_head = True
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]  # other keys are the server's
        scope[WRITE] = self.write_part

    def on_headers_complete(self) -> None:
        """See uvicorn's protocol."""
        self._in_head, former = False, self.cycle
        super().on_headers_complete()
        if self.cycle is not former:  # it is none that offers an upgrade
            self._cycles.append(self.cycle)

    def _should_upgrade(self) -> bool:
        return any(name == b"upgrade" for name, _ in self.headers)

    def handle_websocket_upgrade(self) -> None:
        """Read a request that offers an upgrade (Java's clients offer h2c) again without the offer, which is declined:
        the parser skips its body. uvicorn calls this for the parser's exception, which has the place after the head."""
        raised = sys.exception()
        assert isinstance(raised, HttpParserUpgrade)
        line = f"{self.scope['method']} ".encode() + self.url + f" HTTP/{self.scope['http_version']}".encode()
        rest = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._data = b"\r\n".join([line, *rest, b"", self._data[raised.args[0] :]])
        self.parser = HttpRequestParser(self)  # the former one is at its end if the head has "Connection: close"
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        super().data_received(self._data)

    def write_part(self, data: bytes) -> bool:
        """Write a part of the body of an answer that has begun and is chunked, without the calls of ASGI's ``send``.
        Return False, without an effect, if the connection takes no bytes now."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def on_response_complete(self) -> None:
        """See uvicorn's protocol."""
        self._gate.release(self)
        self._cycles.popleft()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._look()

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        super().resume_writing()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP, with OpenAI's error object."""
        self._gate.leave(self)
        self.refuse(ApiError(400, f"{msg.rstrip('.')} (send HTTP/1.1)"))

    def refuse(self, error: ApiError) -> None:
        """Close the connection, with this error unless an answer has begun, or no request came in time."""
        if self.transport.is_closing():
            return
        is_idle = self._is_between() and not self._begun and error.status == 408
        is_answered = any(cycle.response_started for cycle in self._cycles)
        if not (is_idle or is_answered):
            self.transport.write(_bytes_of(error))
        if self.transport.get_write_buffer_size():  # of one that does not read
            self.transport.abort()
        else:
            self.transport.close()

    def _is_between(self) -> bool:
        """Whether no request has an answer outstanding."""
        return self.cycle is None or self.cycle.response_complete

    def _phase(self) -> Phase:
        if self.flow.write_paused:
            return Phase.UNREAD
        if len(self._cycles) > 1:  # of the later ones no more is read
            return Phase.ANSWER
        if self.cycle is not None and self.cycle.more_body:
            return Phase.BODY
        return Phase.HEAD if self._is_between() else Phase.ANSWER

    def _look(self, *, again: bool = False) -> None:
        """Report the phase of the connection to the gate, if it has changed, or has begun ``again``."""
        phase, former = self._phase(), self._gate.phase_of(self)
        if former is not None and (again or phase is not former):
            self._begun = False
            self._gate.now(self, phase)


def _bytes_of(error: ApiError) -> bytes:
    """Return a whole HTTP response."""
    answer = error_response(error)
    lines = [f"HTTP/1.1 {answer.status_code} {http.HTTPStatus(answer.status_code).phrase}".encode()]
    lines += [name + b": " + value for name, value in (*answer.raw_headers, (b"connection", b"close"))]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])
