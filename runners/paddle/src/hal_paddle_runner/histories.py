"""Token histories for penalties, kept on the host only for the requests with penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core import ENTERING, LEAVING, AdmittedRequest, SamplingParams, TaskBatch

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class History:
    """The tokens of one request: ``tokens`` int64 ``[most]`` holds the prompt, then ``generated`` more."""

    __slots__ = ("generated", "prompt_len", "tokens")

    def __init__(self, request: AdmittedRequest) -> None:
        self.prompt_len, self.generated = request.prompt_len, request.generated
        self.tokens = np.empty(request.prompt_len + request.params.max_tokens, np.int64)
        self.tokens[: request.total] = request.tokens

    @property
    def prompt(self) -> Int64s:
        """Return the prompt's tokens."""
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> Int64s:
        """Return the generated tokens."""
        return self.tokens[self.prompt_len : self.prompt_len + self.generated]

    def append(self, tokens: Int64s) -> None:
        """Add further generated tokens."""
        end = self.prompt_len + self.generated
        self.tokens[end : end + len(tokens)] = tokens
        self.generated += len(tokens)

    def with_drafts(self, drafts: Int64s) -> list[Int64s]:
        """Return the generated tokens as each draft and the token after them see them: followed by none of the drafts,
        by one, and so on. The next :meth:`append` overwrites the memory behind the generated tokens."""
        end = self.prompt_len + self.generated
        self.tokens[end : end + len(drafts)] = drafts
        return [self.tokens[self.prompt_len : end + count] for count in range(len(drafts) + 1)]


class Histories(dict[int, History]):
    """Slot to history, for the slots whose requests have penalties."""

    def follow(self, tasks: TaskBatch) -> None:
        """Update the histories for the requests that enter and leave."""
        columns = (tasks.plain["kinds"], tasks.plain["slots"], tasks.requests, tasks.plain["first_tokens"])
        for kind, slot, request, first_token in zip(*columns, strict=True):
            if kind in LEAVING:
                self.pop(slot, None)
            elif kind in ENTERING:
                self.pop(slot, None)
                if has_penalties(request.params):
                    self[slot] = History(request)
                    if first_token >= 0:
                        self[slot].append(np.array([first_token]))

    def observe(self, slots: list[int], accepted: Sequence[Int64s]) -> None:
        """Add the tokens that a step gave to each of some slots."""
        for slot, tokens in zip(slots, accepted, strict=True):
            if slot in self:
                self[slot].append(tokens)


def has_penalties(params: SamplingParams) -> bool:
    """Return whether earlier tokens change how later ones are sampled."""
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
