"""The load of the end-to-end job: the same arrivals for every peer, at the rate in the text of the job."""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.gpu.load import Shape, arrivals

STEP = 0.01


def test_the_same_seed_gives_the_same_arrivals_in_order():
    load = arrivals(Shape(), STEP, 30.0, 5)
    assert load == arrivals(Shape(), STEP, 30.0, 5)
    assert load != arrivals(Shape(), STEP, 30.0, 6)
    assert [one.at for one in load] == sorted(one.at for one in load)
    assert len({one.name for one in load}) == len(load)


def test_the_poisson_process_keeps_nine_of_ten_slots_busy():
    shape = Shape(burst=0)
    load = arrivals(shape, STEP, 400.0, 7)
    begins = np.array([one.at for one in load])
    ends = begins + np.array([one.tokens for one in load]) * STEP
    busy = [int(((begins <= at) & (ends > at)).sum()) for at in np.arange(0.5, 395.0, 0.5)]
    assert abs(np.mean(busy) - 0.9 * shape.slots) < 4
    assert abs(np.mean(busy[:6]) - 0.9 * shape.slots) < 25, "the run does not begin in the middle"
    assert {one.tokens for one in load if one.at > 0} <= set(range(64, 513))


def test_bursts_come_at_once():
    load = [one for one in arrivals(Shape(), STEP, 33.0, 1) if one.name.startswith("burst")]
    assert sorted(Counter(one.at for one in load).values()) == [16] * 4
