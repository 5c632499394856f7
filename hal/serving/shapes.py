"""OpenAI's response objects: of a whole answer, and of the chunks of a stream."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hal.generation import Part
from hal.model.tokenizer import Tokenizer

from .answers import REASONS

NEVER = -9999.0
"""OpenAI's log-probability of a token that cannot be."""
Pairs = Sequence[Sequence[tuple[int, float]]]


class Shape:
    """The objects of one response; a subclass for each route."""

    prefix, whole, chunk = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._facts = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def answer(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """Return the object of whole answers."""
        return {**self._facts, "object": self.whole, "choices": choices, "usage": usage}

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

    def text_of(self, token: int) -> str:
        """Return the text of one token."""
        return self._tokenizer.decode([token])


class CompletionShape(Shape):
    """Of ``/v1/completions``."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

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
        texts = [self.text_of(one[0][0]) for one in pairs]
        best = [{self.text_of(token): _finite(value) for token, value in one[1:]} for one in pairs]
        *offsets, self._lengths[index] = accumulate(map(len, texts), initial=self._lengths[index])
        values = [_finite(one[0][1]) for one in pairs]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}


class ChatShape(Shape):
    """Of ``/v1/chat/completions``."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

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
        text = self.text_of(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(text.encode())}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return OpenAI's count of tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NEVER
