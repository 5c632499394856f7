"""OpenAI's response objects: of a whole answer, and of the chunks of a stream."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from hal_engine.generation import Part
from hal_engine.model.tokenizer import Tokenizer

from .answers import REASONS

NEVER = -9999.0
"""OpenAI's log-probability of a token that cannot be."""
Pairs = Sequence[Sequence[tuple[int, float]]]


class Shape:
    """The objects of one response; a subclass for each route."""

    prefix, response, chunk = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._facts = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def answer(self, choices: Sequence[object], usage: dict[str, int]) -> dict[str, Any]:
        """Return the object of whole answers. ``choices``: objects, or their JSON as :class:`msgspec.Raw`."""
        return {**self._facts, "object": self.response, "choices": choices, "usage": usage}

    def event(self, choices: Sequence[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return the object of one event of a stream."""
        return {**self._facts, "object": self.chunk, "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice with which an answer's stream begins."""
        return None

    def choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """Return a whole answer."""
        raise NotImplementedError

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """Return one part of an answer."""
        raise NotImplementedError

    def name_of(self, token: int) -> str:
        """Return the text of one token; ``bytes:`` and its bytes if they are no whole characters (OpenAI's form)."""
        return next(self._names(token))

    def _names(self, token: int) -> Iterator[str]:
        """Give names of a token, of which the last one belongs to it alone."""
        own = self._tokenizer.bytes_of(token)
        if own is None and (spelled := self._tokenizer.spelled(token)):
            yield spelled
        if own is not None:
            with suppress(UnicodeDecodeError):
                yield own.decode()
            yield "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
        yield f"token_id:{token}"


class CompletionShape(Shape):
    """Of ``/v1/completions``."""

    prefix, response, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        super().__init__(model, tokenizer, logprobs=logprobs)
        self._lengths = Counter[int]()  # of the tokens that each answer has so far, in characters

    def choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """See :class:`Shape`."""
        text = "".join(part.text for part in parts)
        reason = parts[-1].finish_reason
        found = self._probabilities(index, [pairs for part in parts for pairs in part.logprobs])
        return {"index": index, "text": text, "logprobs": found, "finish_reason": REASONS[reason] if reason else None}

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """See :class:`Shape`."""
        return self.choice(index, [part])

    def _probabilities(self, index: int, pairs: Pairs) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens = [one[0][0] for one in pairs]
        best = [self._named(one[1:]) for one in pairs]
        *offsets, self._lengths[index] = accumulate(map(self._length, tokens), initial=self._lengths[index])
        values = [_finite(one[0][1]) for one in pairs]
        names = [*map(self.name_of, tokens)]
        return {"tokens": names, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}

    def _named(self, pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by tokens' names, each under one of its own: several tokens may have one text."""
        found: dict[str, float] = {}
        for token, value in pairs:
            found[next(name for name in self._names(token) if name not in found)] = _finite(value)
        return found

    def _length(self, token: int) -> int:
        """Return how many characters of the text begin in a token."""
        return sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.bytes_of(token) or b"")


class ChatShape(Shape):
    """Of ``/v1/chat/completions``."""

    prefix, response, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        """See :class:`Shape`."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """See :class:`Shape`."""
        message = {"role": "assistant", "content": "".join(part.text for part in parts)}
        found = self._probabilities([pairs for part in parts for pairs in part.logprobs])
        reason = parts[-1].finish_reason
        return {
            "index": index,
            "message": message,
            "logprobs": found,
            "finish_reason": REASONS[reason] if reason else None,
        }

    def piece(self, index: int, part: Part) -> dict[str, Any]:
        """See :class:`Shape`."""
        delta = {"content": part.text} if part.text else {}
        reason = part.finish_reason
        found = self._probabilities(part.logprobs)
        return {"index": index, "delta": delta, "logprobs": found, "finish_reason": REASONS[reason] if reason else None}

    def _probabilities(self, pairs: Pairs) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {
            "content": [{**self._one(*one[0]), "top_logprobs": [self._one(*pair) for pair in one[1:]]} for one in pairs]
        }

    def _one(self, token: int, value: float) -> dict[str, Any]:
        own = self._tokenizer.bytes_of(token)
        return {"token": self.name_of(token), "logprob": _finite(value), "bytes": None if own is None else list(own)}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's count of tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NEVER
