"""The names of requests, and the access log: a line for each request once its response has ended."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.routing import Match, Route
from starlette.types import Message, Scope, Send

if TYPE_CHECKING:
    from .answers import Answers

ENTRY = "hal.entry"
"""Key of a scope: the request's :class:`Entry`."""
_HEADER = b"x-request-id"
_NAME = re.compile(rb"[\w.:@/+=-]{1,128}")
"""A client's name for its request that is taken, and given back: it can neither end a line nor fill the log."""


class Entry:
    """One request: its name, and what the log shows of it.

    ``name``: the client's ``X-Request-Id`` if it is 1 to 128 letters, digits and ``._:@/+=-``, else a new one.
    ``answers``: those of the engine, if it was asked for some.
    """

    def __init__(self, scope: Scope) -> None:
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        self.name = given.decode("ascii") if _NAME.fullmatch(given) else uuid.uuid4().hex
        self.answers: Answers | None = None
        self._scope, self._status, self._began = scope, 0, time.monotonic()

    def named(self, send: Send) -> Send:
        """Return a ``send`` that gives the response the name, and notes its status."""

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_HEADER, self.name.encode())]}
            await send(message)

        return send_named

    def fields(self, routes: Sequence[Route]) -> dict[str, Any]:
        """Return what the log shows. Times are in milliseconds since the head of the request had come.

        ``ended``: the worst of its answers' ends, "stop" or "length", "abort" (by the client) or "error"; None for a
        request without answers.
        """
        client = self._scope.get("client")
        found: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.name,
            "client": client[0] if client else None,
            "method": self._scope["method"],
            "route": next((one.path for one in routes if one.matches(self._scope)[0] is not Match.NONE), None),
            "status": self._status or None,
            "ms": self._since(time.monotonic()),
        }
        if (answers := self.answers) is not None:
            firsts = [timing.first for timing in answers.timings if timing.first]
            found["prompt_tokens"] = answers.wanted.prompt_tokens
            found["tokens"] = sum(timing.tokens for timing in answers.timings)
            found["first_ms"] = self._since(min(firsts)) if firsts else None
            ends = [timing.reason for timing in answers.timings]
            found["ended"] = max(ends, key=_ENDS.index, default="error") if answers.error is None else "error"
        return found

    def _since(self, now: float) -> float:
        return round((now - self._began) * 1000, 1)


_ENDS = ("stop", "length", "", "abort", "error")
"""Ends of an answer, from the best; "" for one that has not ended."""


def as_text(fields: Mapping[str, Any]) -> str:
    """Return a line of ``NAME=VALUE``, after time, client, method, route and status; "-" for None."""
    first = ("time", "client", "method", "route", "status")
    shown = {name: "-" if value is None else str(value) for name, value in fields.items()}
    rest = (f"{name}={value}" for name, value in shown.items() if name not in first)
    return " ".join([*(shown[name] for name in first), *rest])


def as_json(fields: Mapping[str, Any]) -> str:
    """Return one JSON object."""
    return msgspec.json.encode(fields).decode()


def formatter(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what makes a line, for "text" or "json"."""
    return as_json if name == "json" else as_text
