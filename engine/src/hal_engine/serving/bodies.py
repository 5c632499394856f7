"""Bodies of requests from JSON: each field is taken, asks for nothing, or is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from hal_engine.spelling import meant

from .errors import ApiError
from .messages import Function, Message, TextPart, ToolCall
from .schemas import StreamOptions

Body = TypeVar("Body", bound=msgspec.Struct)

PAGE = "docs/serving.md"
"""The page with the fields that are offered, and the servers that offer the rest."""
_INNER: dict[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "messages": Message,
    "content": TextPart,
    "tool_calls": ToolCall,
    "function": Function,
}
"""Fields whose value is an object, or a list of objects, with fields of its own."""
_MOST_FIELDS = 256
"""Most fields of an object."""
_NAME = 64
"""Most characters of an unknown field's name in an error."""

UNREAD = frozenset(["user", "metadata", "safety_identifier", "prompt_cache_key", "cache_control"])
"""Fields that change no answer, whatever their value: they are for a provider's records and caches."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "include_obfuscation": (False,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_reasoning": (True,),
    "return_token_strs": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
"""Values with which fields that are not offered ask for nothing. Null, [] and {} ask for nothing in any field."""


def read_body(kind: type[Body], data: bytes, *, lenient: bool) -> Body:
    """Return the body of a request. Raises :class:`ApiError` that names the field for anything that is not offered."""
    try:
        data.decode()
        return msgspec.convert(_taken(kind, msgspec.json.decode(data), "", lenient=lenient), kind)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} (send JSON in UTF-8)") from error
    except msgspec.ValidationError as error:
        wrong, at, place = str(error).rpartition(" - at `$.")
        if not at:
            text = f"{place[0].lower()}{place[1:]}"
            raise ApiError(400, f"the body: {text} (send a JSON object)") from error
        param = place.rstrip("`")
        raise ApiError(400, f"{param}: {wrong[0].lower()}{wrong[1:]}", param=param) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error} (send a JSON object)") from error


def _taken(kind: type[msgspec.Struct], found: Any, where: str, *, lenient: bool) -> Any:  # noqa: ANN401 (any JSON)
    """Return an object, or each one of a list, with the fields that ``kind`` has and the client gives: null gives none.

    ``where``: its place in the body.
    """
    if isinstance(found, list):
        return [_taken(kind, one, f"{where}[{number}]", lenient=lenient) for number, one in enumerate(found)]
    if not isinstance(found, dict):
        return found
    if kind is TextPart and found.get("type") != "text":
        raise ApiError(400, f"{where}: only text is offered ({PAGE} says what offers the rest)", param=where)
    inside, fields = f"{where}." if where else "", kind.__struct_fields__
    if len(found) > _MOST_FIELDS:
        what = f"{len(found)} fields in an object (send at most {_MOST_FIELDS})"
        raise ApiError(400, f"{where}: {what}" if where else what, param=where or None)
    kept: dict[str, Any] = {}
    if kind is Message and ("content" in found or found.get("tool_calls")):
        kept["content"] = None  # a null that counts
    for name, value in found.items():
        if value is None:
            continue
        if name not in fields:
            if not lenient and value not in ([], {}) and name not in UNREAD and value not in NEUTRAL.get(name, ()):
                raise _refused(name, inside, fields)
        elif name in _INNER:
            kept[name] = _taken(_INNER[name], value, inside + name, lenient=lenient)
        else:
            kept[name] = value
    return kept


def _refused(name: str, inside: str, fields: tuple[str, ...]) -> ApiError:
    close = None if name in NEUTRAL else meant(name, fields)
    cure = f"leave it out, or start with --lenient; {PAGE} says what offers it"
    shown = inside + (name if len(name) <= _NAME else f"{name[:_NAME]}…")
    return ApiError(400, f"{shown} is not offered ({f'did you mean {close}?' if close else cure})", param=shown)
