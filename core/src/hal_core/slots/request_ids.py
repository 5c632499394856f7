"""Request ids: non-empty text without NUL characters that UTF-8 can encode.

Frames carry the ids of a step's requests joined by NUL characters, and a draw depends on the bytes of the id.
"""

from __future__ import annotations

from ..errors import InvalidValue

#: The last ids that were joined. A batch often keeps its requests from step to step, and each record's ids are needed
#: twice: to check it and to encode it. One assignment replaces it, so threads need no lock.
_last_joined: tuple[tuple[str, ...], str] = ((), "")


def check_request_id(name: object) -> None:
    """Raise :class:`InvalidValue` for a name that a frame cannot carry."""
    if not isinstance(name, str) or not (name.isascii() or _is_text(name)):
        raise InvalidValue(f"request_id = {name!r}", cure="give a string that UTF-8 can encode", argument="request_id")
    if not name or "\0" in name:
        raise InvalidValue(
            f"request_id = {name!r}", cure="give a name that is not empty, without NUL", argument="request_id"
        )


def _is_text(name: str) -> bool:
    """Return False for a lone surrogate."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def join_request_ids(request_ids: tuple[str, ...]) -> str:
    """Return the ids joined by NUL characters, the form in which frames carry them.

    Raises ValueError or TypeError if an id is empty, holds a NUL character or is not a string.
    """
    global _last_joined
    last_ids, joined = _last_joined
    if request_ids is last_ids:
        return joined
    joined = "\0".join(request_ids)
    if request_ids and joined.count("\0") != len(request_ids) - 1:
        raise ValueError("an id holds a NUL character")
    if request_ids and (not joined or joined[0] == "\0" or joined[-1] == "\0" or "\0\0" in joined):
        raise ValueError("an id is empty")
    _last_joined = (request_ids, joined)
    return joined
