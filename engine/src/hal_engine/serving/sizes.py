"""How much a body may hold, and large answers in pieces: an interpreter that reads or writes JSON does nothing else
meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError

VALUES = 1 << 18
"""Most values in a body, if the model's context is not longer: prompts may be token ids."""
OBJECTS = 1 << 15
"""Most lists, objects, and fields of objects in a body: each costs as much time as tens of numbers."""
_PIECE = 1 << 18
_QUOTE, _ESCAPE = b'"\\'


def check_size(data: bytes, longest: int = 0) -> None:
    """Raise :class:`ApiError` for a JSON body of too many values. What texts contain does not count.

    ``longest``: most tokens of a prompt. The interpreter's lock is held for 5 ms at most (4 MiB, 2.1 GHz)."""
    most = max(VALUES, longest)
    if _fits(_counted(data), most):  # even with all that is in its texts
        return
    found = (0, 0)
    for piece in _outside_texts(data):
        objects, values = _counted(piece)
        found = found[0] + objects, found[1] + values
        if not _fits(found, most):
            what = f"the body has more than {OBJECTS} lists, objects and fields, or more than {most} values"
            raise ApiError(413, f"{what} (send several requests)", code="request_too_large")


def _fits(counted: tuple[int, int], most: int) -> bool:
    return counted[0] <= OBJECTS and counted[1] <= most


def _counted(data: bytes) -> tuple[int, int]:
    """Return how many objects, and how many values, data can have at most."""
    objects = sum(map(data.count, (b"[", b"{", b":")))
    return objects, objects + data.count(b",")


def _outside_texts(data: bytes) -> Iterator[bytes]:
    """Give what stands outside of texts, piece by piece. NumPy lets other threads run meanwhile."""
    inside, escapes = 0, 0  # in a text at the end of the last piece; after so many backslashes
    for start in range(0, len(data), _PIECE):
        piece = np.frombuffer(data, np.uint8, min(_PIECE, len(data) - start), start)
        place = np.arange(len(piece), dtype=np.int32)
        plain = np.maximum.accumulate(np.where(piece == _ESCAPE, -1 - escapes, place))  # the last place without one
        before = place - 1 - np.concatenate(([-1 - escapes], plain[:-1]))
        quotes = (piece == _QUOTE) & (before % 2 == 0)
        state = (np.cumsum(quotes, dtype=np.uint8) + inside) & 1
        yield piece[state == 0].tobytes()
        inside, escapes = int(state[-1]), len(piece) - 1 - int(plain[-1])


def encoded(found: object) -> bytes:
    """Return JSON, made of one item of a list after the other, so that other threads run in between."""
    if isinstance(found, dict):
        fields = (msgspec.json.encode(name) + b":" + encoded(value) for name, value in found.items())
        return b"{" + b",".join(fields) + b"}"
    if isinstance(found, list):
        return b"[" + b",".join(map(msgspec.json.encode, found)) + b"]"
    return msgspec.json.encode(found)


class InPieces(Response):
    """A response that is given to its connection piece by piece, as its client reads it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, max(1, len(self.body)), _PIECE):
            piece, more = self.body[start : start + _PIECE], start + _PIECE < len(self.body)
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": more})
