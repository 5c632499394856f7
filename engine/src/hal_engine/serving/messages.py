"""Messages of a chat: as clients send them, and as a chat template sees them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .errors import ApiError


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's ``content``."""

    type: str
    text: str


class Function(msgspec.Struct, kw_only=True):
    """What a tool call calls. ``arguments``: an object, as JSON text or as it is."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an assistant's message."""

    function: Function
    id: str | None = None
    type: str = "function"
    index: int | None = None


class Message(msgspec.Struct):
    """One message of a chat. ``reasoning`` is another name of ``reasoning_content``."""

    role: str
    content: str | list[TextPart] | None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Arguments(dict[str, Any]):
    """A call's arguments: an object to a template that walks it, the client's own text to one that prints it."""

    def __init__(self, found: dict[str, Any], text: str) -> None:
        super().__init__(found)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return self._text + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + self._text


def as_template_sees(message: Message, where: str) -> dict[str, Any]:
    """Return a message as templates expect it: ``content`` is one text, what is absent has no key, and a tool call's
    arguments are an object. ``where`` names it in errors (:class:`ApiError`)."""
    found: dict[str, Any] = {"role": message.role}
    if isinstance(message.content, list):
        found["content"] = "\n".join(part.text for part in message.content)  # as vLLM joins them
    elif message.content is not None:
        found["content"] = message.content
    elif not message.tool_calls:
        found["content"] = ""
    found |= {name: text for name in ("name", "tool_call_id") if (text := getattr(message, name)) is not None}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]") for number, call in calls]
    thought = message.reasoning_content or message.reasoning
    return found if thought is None else found | {"reasoning_content": thought, "thinking": thought}


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    arguments = _arguments(call.function.arguments, f"{where}.function.arguments")
    found = {"type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
    return found if call.id is None else {"id": call.id, **found}


def _arguments(given: str | dict[str, Any], where: str) -> Arguments:
    if isinstance(given, dict):
        return Arguments(given, json.dumps(given, ensure_ascii=False))
    try:
        found = msgspec.json.decode(given or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"{where}: no JSON: {error} (send an object's text)", param=where) from None
    if not isinstance(found, dict):
        raise ApiError(400, f"{where}: no object (send an object's text)", param=where)
    return Arguments(found, given)
