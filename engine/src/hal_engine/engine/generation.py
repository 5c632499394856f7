"""One request in the engine, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hal_core import AdmittedRequest, FinishReason, InvalidValue, Request, StateConfig


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request.

    ``token_ids``: all tokens that it generated. ``message``: text of an error. ``reported``: whether a record reports
    the end too, so that a reader sees it; False for a request that was refused, or aborted while waiting. ``refused``:
    it cannot run, by its own fields.
    """

    request_id: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    message: str = ""
    reported: bool = True
    refused: bool = False


def tokens_to_keep(prompt_len: int, max_tokens: int) -> int:
    """Return the most tokens of a request whose KV is ever needed: the last generated token is not fed."""
    return prompt_len + max_tokens - 1


def check_fits(admitted: AdmittedRequest, sizes: StateConfig, blocks: int) -> None:
    """Raise :class:`InvalidValue`, with the cure, for a request that needs more tokens or KV blocks than exist."""
    who, most = f"request {admitted.request_id!r}", admitted.params.max_tokens
    if admitted.prompt_len + most > sizes.max_model_len:
        raise InvalidValue(
            f"{admitted.prompt_len} prompt tokens and max_tokens = {most} are over the length of {sizes.max_model_len}",
            cure=f"lower max_tokens to {sizes.max_model_len - admitted.prompt_len}, or shorten the prompt",
            argument=who,
        )
    needed = -(-tokens_to_keep(admitted.prompt_len, most) // sizes.block_size)
    if needed > blocks:
        raise InvalidValue(
            f"needs up to {needed} KV blocks of {sizes.block_size} tokens, there are {blocks}",
            cure="give more blocks, shorten the prompt, or lower max_tokens",
            argument=who,
        )


@dataclass(slots=True, eq=False)
class Generation:
    """A request from its arrival to its end.

    - ``admitted``: its packed form for its present or next stay in a slot.
    - ``generated``: every token so far; ``known`` counts them with the prompt's.
    - ``slot``: its slot, -1 while it waits; ``blocks``: the KV blocks that it holds, in order.
    - ``prefilled``: tokens that its tasks have fed in this stay; ``goal``: how many there are to prefill, the prompt
      and, after a preemption, the tokens generated before.
    - ``pending``: most tokens that steps in flight may give it.
    - ``rank``: its place in the order of service: its priority, the lower first, then its number among all requests.
    - ``due``: number of the step that checks whether it lacks blocks (:mod:`hal_engine.engine.due`).
    - ``aborted``: its abort was requested, and its end is not reported yet.
    """

    request: Request
    admitted: AdmittedRequest
    prompt_len: int
    generated: list[int]
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    prefilled: int = 0
    goal: int = 0
    pending: int = 0
    due: int = 0
    aborted: bool = False
    rank: tuple[int, int] = (0, 0)

    def arrive(self, number: int) -> None:
        """Take a place in the order of service, as the request of that number."""
        self.rank = self.request.priority, number

    @property
    def request_id(self) -> str:
        """The user's name of the request."""
        return self.request.request_id

    @property
    def known(self) -> int:
        """Tokens known so far, prompt and generated."""
        return self.prompt_len + len(self.generated)

    @property
    def limit(self) -> int:
        """Most tokens whose KV it may ever need."""
        return tokens_to_keep(self.prompt_len, self.request.params.max_tokens)

    @property
    def decoding(self) -> bool:
        """True when all tokens known at its entry have been fed, so that each step gives one token."""
        return self.prefilled >= self.goal

    def furthest(self, tokens: int) -> int:
        """Return the most tokens whose KV it needs after ``tokens`` more than the known ones."""
        return min(self.known + tokens, self.limit)

    def enter(self, slot: int, blocks: Sequence[int], length: int) -> None:
        """Take a slot; the next step feeds the first ``length`` tokens."""
        self.slot, self.blocks, self.prefilled, self.goal = slot, list(blocks), length, self.known

    def finished(self, reason: FinishReason, message: str = "", *, reported: bool = True) -> Finished:
        """Return the request's end as the engine reports it."""
        return Finished(self.request_id, tuple(self.generated), reason, message, reported)
