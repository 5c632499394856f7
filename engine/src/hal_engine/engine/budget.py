"""Token budget of a step: decoding first, whose need is known before the step, then prompts with the remaining
tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hal_core import InvalidValue, StateConfig

DEFAULT_CHUNK = 256
"""Default of the most prompt tokens that a step feeds."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a step: ``chunk`` prompt tokens at most and, if ``step_tokens`` is given, so many tokens in all.

    Decoding is never held back. So ``step_tokens`` must exceed the tokens that all slots may decode, each its next
    token and its drafts; otherwise prompts might wait for ever. Raises :class:`InvalidValue`.
    """

    chunk: int
    step_tokens: int | None
    sizes: StateConfig

    def __post_init__(self) -> None:
        for name, given in (("chunk", self.chunk), ("step_tokens", self.step_tokens)):
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                cure = "give a whole number of at least 1"
                raise InvalidValue(f"{given!r} tokens a step", cure=cure, argument=name)
        decoding = self.sizes.num_slots * self.sizes.max_accept
        if self.step_tokens is not None and self.step_tokens <= decoding:
            raise InvalidValue(
                f"{self.step_tokens} tokens a step leave none to prompts beside {self.sizes.num_slots} requests that "
                f"decode {self.sizes.max_accept} each",
                cure=f"give at least {decoding + 1}, or fewer slots or drafts",
                argument="step_tokens",
            )

    def prompt_tokens(self, launched: int) -> int:
        """Return the most prompt tokens of a step that launches so many tokens for decoding (requests times 1 and
        drafts, because the number of drafts is not known yet)."""
        return self.chunk if self.step_tokens is None else min(self.chunk, self.step_tokens - launched)
