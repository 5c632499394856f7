"""The answers of one request: several prompts, several choices each, as one stream of parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from hal_core import FinishReason

from hal_engine.generation import AsyncEngine, Part
from hal_engine.model.stops import checked_stops

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


async def parts_of(engine: AsyncEngine, wanted: Wanted, metrics: Metrics) -> AsyncIterator[tuple[int, Part]]:
    """Give the parts of all answers with the number of their choice, as they come. Closing it aborts the rest."""
    queue = asyncio.Queue[tuple[int, Part] | Exception]()

    async def generate(choice: int) -> None:
        ids, number = wanted.prompts[choice // wanted.n], choice % wanted.n
        timing = metrics.request(len(ids))
        try:
            stream = engine.generate(ids, wanted.params, stop=wanted.stops, number=number, priority=wanted.priority)
            async with aclosing(stream):  # type: ignore[type-var]
                async for part in stream:
                    _time(timing, part)
                    queue.put_nowait((choice, _without_stop(part, wanted.stops)))
        except Exception as error:  # noqa: BLE001 (the reader of the queue raises it)
            timing.end("error")
            queue.put_nowait(error)
        except asyncio.CancelledError:
            timing.end("abort")
            raise

    left = len(wanted.prompts) * wanted.n
    tasks = list[asyncio.Task[None]]()
    try:
        for choice in range(left):
            tasks.append(asyncio.create_task(generate(choice)))
            await asyncio.sleep(0)  # other requests' turn
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            yield found
            left -= found[1].finish_reason is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _without_stop(part: Part, stops: Sequence[str]) -> Part:
    """Return a part without the stop text at its end, which OpenAI's answers do not have."""
    if not part.by_text:
        return part
    longest = max((stop for stop in stops if part.text.endswith(stop)), key=len)
    return replace(part, text=part.text.removesuffix(longest))


def _time(timing: Timing, part: Part) -> None:
    timing.part(len(part.token_ids))
    if part.finish_reason is not None:
        timing.end(REASONS[part.finish_reason])
