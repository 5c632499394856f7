"""Bodies of requests: OpenAI's fields, as far as they are offered (API reference, "completions" and "chat")."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

import msgspec

from .errors import ApiError

Count = Annotated[int, msgspec.Meta(ge=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``include_usage``: end a stream with a chunk that counts tokens; ``continuous_usage_stats``: count in each chunk
    (vLLM's)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that completions and chats share; None: the checkpoint's default, or OpenAI's."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    user: str | None = None

    def changed(self) -> dict[str, Any]:
        """Return the parameters that the request gives, by hal's names."""
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
        found = {name: getattr(self, name) for name in (*names, "repetition_penalty", "min_tokens")}
        return {name: value for name, value in found.items() if value is not None}

    def as_typed(self, name: str) -> str:
        """Return the field of this request that gave the engine's parameter ``name``."""
        return name

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Sampling, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one. Raises :class:`ApiError` for a list of several kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        if not ids:
            return [one for one in self.prompt if not isinstance(one, int)]
        if len(ids) < len(self.prompt):
            raise ApiError(400, "token ids beside texts or lists (give one kind)", param="prompt")
        return [ids]


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat."""

    role: str
    content: str
    name: str | None = None


class Chat(Sampling, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def as_typed(self, name: str) -> str:
        """See :class:`Sampling`."""
        tokens = "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
        return {"prompt": "messages", "max_tokens": tokens, "logprobs": "top_logprobs"}.get(name, name)


class Tokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``."""

    prompt: str
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)
_INNER: dict[str, type[msgspec.Struct]] = {"stream_options": StreamOptions, "messages": Message}
"""Fields whose value is an object, or a list of objects, with fields of its own."""


def _offered(kind: type[msgspec.Struct], found: Any) -> Any:  # noqa: ANN401 (whatever JSON can hold)
    """Return an object, or each one of a list, without the fields that ``kind`` does not have."""
    if isinstance(found, list):
        return [_offered(kind, one) for one in found]
    if not isinstance(found, dict):
        return found
    kept = {name: value for name, value in found.items() if name in kind.__struct_fields__}
    return kept | {name: _offered(inner, kept[name]) for name, inner in _INNER.items() if name in kept}


def read_body(kind: type[Body], data: bytes, *, lenient: bool) -> Body:
    """Return the body of a request. Raises :class:`ApiError` that names the field for anything that is not offered."""
    try:
        data.decode()
        if lenient:
            return msgspec.convert(_offered(kind, msgspec.json.decode(data)), kind)
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start} (send JSON in UTF-8)") from error
    except msgspec.ValidationError as error:
        text = str(error)
        wrong, at, place = text.rpartition(" - at `$.")
        param = place.rstrip("`") if at else None
        if text.startswith("Object contains unknown field"):
            param = text.split("`")[1]
            close = get_close_matches(param, kind.__struct_fields__, 1)
            cure = f"did you mean {close[0]}?" if close else "leave it out, or start the server with --lenient"
            text = f"{param} is not offered ({cure})"
        elif param is not None:
            text = f"{param}: {wrong[0].lower()}{wrong[1:]}"
        else:
            text = f"the body: {text[0].lower()}{text[1:]} (send a JSON object)"
        raise ApiError(400, text, param=param) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error} (send a JSON object)") from error
