"""Bodies of requests: OpenAI's fields, as far as they are offered (API reference, "completions" and "chat")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from hal_core import PARAMS

from hal_engine.generation.plan import MOST_ENDS

from .errors import ApiError
from .messages import Message

Count = Annotated[int, msgspec.Meta(ge=1)]
Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=4096)]


class StreamOptions(msgspec.Struct):
    """``include_usage``: end a stream with a chunk that counts tokens; ``continuous_usage_stats``: count in each chunk
    (vLLM's)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


if TYPE_CHECKING:  # no type checker follows what is made of rows
    _Numbers = msgspec.Struct
else:  # the sampling parameters that are one number; None: the checkpoint's default, or OpenAI's
    _Numbers = msgspec.defstruct(
        "_Numbers", [(one.name, (int if one.integer else float) | None, None) for one in PARAMS], kw_only=True
    )


class Sampling(_Numbers, kw_only=True):
    """Fields that completions and chats share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MOST_ENDS)] | None = None
    ignore_eos: bool = False
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0

    def changed(self) -> dict[str, Any]:
        """Return the parameters that the request gives, by hal's names; its length is another matter."""
        found = {one.name: getattr(self, one.name) for one in PARAMS if one.name != "max_tokens"}
        found["top_k"] = 0 if found["top_k"] == -1 else found["top_k"]  # vLLM's way to say "all"
        found["seed"] = None if found["seed"] == -1 else found["seed"]  # llama.cpp's way to say "any"
        found["eos_token_ids"] = self.stop_token_ids
        return {name: value for name, value in found.items() if value is not None} | {"ignore_eos": self.ignore_eos}

    def as_typed(self, name: str) -> str:
        """Return the field of this request that gave the engine's parameter ``name``."""
        return {"eos_token_ids": "stop_token_ids"}.get(name, name)

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Completion(Sampling, kw_only=True):
    """``POST /v1/completions``. ``prompt``: a text, token ids, or a list of either. ``add_special_tokens``: whether
    texts get those that the tokenizer itself puts around a text."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    add_special_tokens: bool = True

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


class Chat(Sampling, kw_only=True):
    """``POST /v1/chat/completions``. The template writes the special tokens, unless ``add_special_tokens``."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False

    def as_typed(self, name: str) -> str:
        """See :class:`Sampling`."""
        tokens = "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
        typed = {"prompt": "messages", "max_tokens": tokens, "logprobs": "top_logprobs"}
        return typed.get(name) or super().as_typed(name)


class Tokenize(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: of a text, or of a chat as the model gets it."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    """None: of a text."""


class Detokenize(msgspec.Struct, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None
