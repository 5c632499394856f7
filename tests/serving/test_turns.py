"""A few turns each time that the event loop goes round."""

import asyncio
from collections import Counter

import pytest
from hal_engine.serving.turns import Turns
from hypothesis import given
from hypothesis import strategies as st


async def rounds_of(turns, tasks, cancelled=(), again=1):
    """Who had turns, in order, and in which rounds of the loop; all ask in the first one."""
    loop, number, seen = asyncio.get_running_loop(), 0, []

    def go_round():
        nonlocal number
        number += 1
        loop.call_soon(go_round)

    async def ask(name):
        for _ in range(again):
            await turns.take()
            seen.append((name, number))

    loop.call_soon(go_round)
    running = [asyncio.create_task(ask(name)) for name in range(tasks)]
    await asyncio.sleep(0)
    for one in cancelled:
        running[one].cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return seen


@given(st.integers(1, 5), st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(1, 3))
def test_each_round_has_few_turns_in_the_order_of_asking(most, tasks, cancelled, again):
    gone = {one for one in cancelled if most <= one < tasks}  # the first ones do not wait
    seen = asyncio.run(rounds_of(Turns(most), tasks, gone, again))
    if again == 1:
        assert [name for name, _ in seen] == [one for one in range(tasks) if one not in gone]
    assert Counter(name for name, _ in seen) == {one: again for one in range(tasks) if one not in gone}
    rounds = Counter(number for _, number in seen)
    assert max(rounds.values()) <= most
    assert max(rounds) - min(rounds) <= 2 * len(seen) / most + 2, "no round is lost"


def test_none_of_many_waits_for_long():
    seen = asyncio.run(rounds_of(Turns(2, 8), 1000))
    assert [name for name, _ in seen] == [*range(1000)]
    assert seen[-1][1] - seen[0][1] < 60, "few a round would be 500"
    assert max(Counter(number for _, number in seen).values()) <= 125


@pytest.mark.parametrize("again", [1, 3])
def test_a_task_that_asks_alone_waits_for_nothing(again):
    async def run():
        turns = Turns(1)
        for _ in range(again):
            with pytest.raises(StopIteration):
                turns.take().send(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())
