"""A few turns each time that the event loop goes round."""

import asyncio
from collections import Counter

import pytest
from hal_engine.serving.turns import MOST, Turns
from hypothesis import given
from hypothesis import strategies as st


async def rounds_of(tasks, cancelled=(), again=1):
    """Who asked for turns, in order, and who had them in which rounds of the loop."""
    loop, turns, number, asked, seen = asyncio.get_running_loop(), Turns(), 0, [], []

    def go_round():
        nonlocal number
        number += 1
        loop.call_soon(go_round)

    async def ask(name):
        for _ in range(again):
            asked.append(name)
            await turns.take()
            seen.append((name, number))

    loop.call_soon(go_round)
    running = [asyncio.create_task(ask(name)) for name in range(tasks)]
    await asyncio.sleep(0)
    for one in cancelled:
        running[one].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return [name for name in asked if name not in cancelled], seen


@given(st.integers(1, 40), st.integers(1, 3), st.sets(st.integers(0, 39)))
def test_each_round_has_few_turns_in_the_order_of_asking(tasks, again, cancelled):
    gone = {one for one in cancelled if MOST <= one < tasks}  # the first ones do not wait
    asked, seen = asyncio.run(rounds_of(tasks, gone, again))
    assert [name for name, _ in seen] == asked
    assert len(seen) == again * (tasks - len(gone))
    rounds = Counter(number for _, number in seen)
    assert max(rounds.values()) <= MOST
    assert max(rounds) - min(rounds) <= 2 * len(seen) / MOST + 2, "no turn is lost"


@pytest.mark.parametrize("again", [1, 3])
def test_a_task_that_asks_alone_waits_for_nothing(again):
    async def run():
        turns = Turns()
        for _ in range(again):
            with pytest.raises(StopIteration):
                turns.take().send(None)
            await asyncio.sleep(0)

    asyncio.run(run())
