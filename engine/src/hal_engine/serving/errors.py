"""OpenAI's error object."""

from __future__ import annotations

import math

import msgspec
from hal_core import HalError, InvalidValue, Unavailable
from starlette.responses import Response

from hal_engine.generation import QueueFull
from hal_engine.model.tokenizer import TooLong
from hal_engine.timeouts import TIMEOUTS


class ApiError(Exception):
    """A request that is refused: an HTTP status, and the fields of OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


_LONGEST = 1000
"""Most characters of an error's message."""
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


def error_of(error: Exception) -> ApiError:
    """Return what a client sees of an error of the engine; its own text names the argument and the cure."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidValue):
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return ApiError(400, str(error), param=error.argument or None, code=code)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, HalError):
        return ApiError(500, str(error), code="engine_error")
    raise error


def error_object(error: ApiError) -> bytes:
    """Return the JSON of an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": _short(error.message), "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def _short(text: str) -> str:
    """Return a text without its middle if it is long: what a client sent is not sent back to it."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"


def error_response(error: ApiError) -> Response:
    """Return the response with which a request is refused."""
    headers = {"Retry-After": str(math.ceil(TIMEOUTS.retry))} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(error_object(error), error.status, headers, "application/json")
