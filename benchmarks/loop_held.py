"""How long ``hal.AsyncEngine`` holds the event loop at a time, with many streams at once.

Each callback of the loop is timed by the processor time of its thread: other work of the machine does not count.
python benchmarks/loop_held.py [streams] [tokens]
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio import events

import numpy as np
from run import versions

import hal

TURNS: list[float] = []


def timed(handle: asyncio.Handle) -> None:
    """Run a callback, and note the milliseconds of processor time that it took."""
    begin = time.thread_time()
    original(handle)
    TURNS.append(1000 * (time.thread_time() - begin))


original = events.Handle._run


async def serve(streams: int, tokens: int) -> tuple[int, float]:
    """All streams to their ends; how many tokens there were, in how many seconds."""
    async with hal.AsyncEngine(device="cpu", slots=streams) as engine:

        async def one(number: int) -> int:
            params = {"max_tokens": tokens, "min_tokens": tokens, "seed": number}
            return sum([len(part.token_ids) async for part in engine.generate("def main(", params)])

        await one(0)
        TURNS.clear()
        begin = time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(streams)))
        return sum(counts), time.perf_counter() - begin


def main() -> None:
    """Print the distribution."""
    streams, tokens = (int(given) for given in (sys.argv[1:] + ["32", "200"][len(sys.argv) - 1 :]))
    events.Handle._run = timed  # type: ignore[method-assign]
    total, seconds = asyncio.run(serve(streams, tokens))
    half, most, longest = np.percentile(TURNS, [50, 99, 100])
    print(f"{versions()}: {streams} streams, {total} tokens in {seconds:.2f} s ({total / seconds:.0f} tokens/s)")
    print(f"the loop was held {len(TURNS)} times: median {half:.3f} ms, p99 {most:.3f} ms, longest {longest:.3f} ms")


if __name__ == "__main__":
    main()
