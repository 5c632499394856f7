"""The answers of one request: several prompts, several choices each, with their parts as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hal_core import FinishReason, HalError
from msgspec.structs import replace

from hal_engine.generation import AsyncEngine, Part
from hal_engine.model.stops import checked_stops
from hal_engine.streams import append

from .metrics import Metrics, Timing

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


@dataclass(frozen=True)
class Wanted:
    """A checked request: the token ids of its prompts, and ``n`` answers to each of them."""

    prompts: Sequence[Sequence[int]]
    n: int
    params: Mapping[str, Any]
    stops: Sequence[str]
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        """How many tokens all prompts have."""
        return sum(map(len, self.prompts))


async def wanted_of(
    engine: AsyncEngine,
    prompts: Sequence[str | Sequence[int]],
    *,
    n: int,
    max_tokens: int | None,
    params: Mapping[str, Any],
    stops: Sequence[str],
    add_special_tokens: bool,
    priority: int = 0,
) -> Wanted:
    """Check and encode a request. ``max_tokens``: None for the room that the longest prompt leaves;
    ``add_special_tokens``: whether texts are raw (:meth:`hal_engine.model.tokenizer.Tokenizer.encode`). Raises
    :class:`InvalidValue`."""
    stops = checked_stops(stops)
    texts = [ids for ids in prompts if isinstance(ids, str)]
    encoded = iter(await engine.encode(texts, add_special_tokens=add_special_tokens))
    found = [next(encoded) if isinstance(ids, str) else ids for ids in prompts]
    tokens = max(1, engine.max_model_len - max(map(len, found))) if max_tokens is None else max_tokens
    for ids in found:
        engine.check(ids, tokens)
    return Wanted(found, n, {**params, "max_tokens": tokens}, stops, priority)


class Answers:
    """All answers of a request as they come: the parts of each choice that nobody has taken are joined.

    ``left``: how many choices have not ended. ``error``: what ends all of them. ``timings``: of the choices begun.
    """

    def __init__(self, engine: AsyncEngine, wanted: Wanted, metrics: Metrics) -> None:
        self.wanted, self._engine, self._metrics = wanted, engine, metrics
        self.left = len(wanted.prompts) * wanted.n
        self.error: Exception | None = None
        self._is_one = self.left == 1
        self._parts: dict[int, list[Part]] = {}
        self._ends = list[Callable[[], None]]()
        self.timings = list[Timing]()
        self._listener: Callable[[], object] = lambda: None
        self._taker: Callable[[Part], bool] | None = None
        self._is_posted = False  # the listener is going to be called

    async def begin(self) -> None:
        """Submit all. Raises as :meth:`AsyncEngine.begin`; :meth:`close` is to be called in any case."""
        wanted = self.wanted
        for choice in range(self.left):
            if choice:
                await asyncio.sleep(0)  # other requests' turn
            ids, number = wanted.prompts[choice // wanted.n], choice % wanted.n
            self.timings.append(timing := self._metrics.request(len(ids)))
            put, stops = partial(self._put, choice, timing), wanted.stops
            try:
                self._ends.append(
                    self._engine.begin(ids, wanted.params, put, stop=stops, number=number, priority=wanted.priority)
                )
            except Exception:
                timing.end("error")
                raise

    def _put(self, choice: int, timing: Timing, part: Part | HalError) -> None:
        if isinstance(part, HalError):
            timing.end("error")
            self.error = self.error or part
        else:
            timing.part(len(part.token_ids))
            if self._taker is not None and self._taker(part):
                return
            if part.finish_reason is not None:
                self.left -= 1
                timing.end(REASONS[part.finish_reason])
                part = _without_stop(part, self.wanted.stops)
            if (former := self._parts.get(choice)) is None:
                self._parts[choice] = [part]
            else:
                append(former, part)
        if self._is_one:
            self._listener()
        elif not self._is_posted:  # one call for all choices' parts of a step
            self._is_posted = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._is_posted = False
        self._listener()

    def listen(self, listener: Callable[[], object], taker: Callable[[Part], bool] | None = None) -> None:
        """Have ``listener`` called after parts have come, or the error. Of a lone choice ``taker`` is given each part
        first, and returns whether it took it; it may take none while others wait. Both raise nothing."""
        self._listener, self._taker = listener, taker if self._is_one else None

    def take(self) -> dict[int, list[Part]]:
        """Return the parts that have come since the last call, by choice."""
        parts, self._parts = self._parts, {}
        return parts

    async def first(self) -> None:
        """Begin, and wait for the first part; raises the error that comes before."""
        await self.begin()
        await self._until(lambda: bool(self._parts))

    async def all(self) -> dict[int, list[Part]]:
        """Begin, and return all parts of each choice; raises the error that comes before."""
        await self.begin()
        await self._until(lambda: not self.left)
        return self._parts

    async def _until(self, holds: Callable[[], bool]) -> None:
        done = asyncio.Event()

        def look() -> None:
            if self.error is not None or holds():
                done.set()

        self.listen(look)
        look()
        await done.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Abort what has not ended. Idempotent."""
        for end in self._ends:
            end()
        for timing in self.timings:
            timing.end("abort")


def _without_stop(part: Part, stops: Sequence[str]) -> Part:
    """Return a part without the stop text at its end, which OpenAI's answers do not have."""
    if not part.by_text:
        return part
    longest = max((stop for stop in stops if part.text.endswith(stop)), key=len)
    return replace(part, text=part.text.removesuffix(longest))
