"""Staging blocks: a plan that was packed and cut has the effect of the plan itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hal_core.memory.packing import LONGEST_WRITE, Packed, apply_packed, cut_long_writes
from hal_core.memory.plan import SCATTER_MAP, PlanBuilder, Records, WritePlan, apply_to_host
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 256 << 10


@dataclass
class Block:
    nbytes: int = SIZE
    address: int = 0
    device: object = None


@st.composite
def plans(draw):
    """A plan of a few writes, some longer than a cut, and perhaps records."""
    builder, at = PlanBuilder(Block()), 4096
    rng = np.random.default_rng(draw(st.integers(0, 99), label="seed"))
    lengths = LONGEST_WRITE, LONGEST_WRITE + 5, 2 * LONGEST_WRITE + 8
    for _ in range(draw(st.integers(0, 6), label="writes")):
        nbytes = draw(st.sampled_from([1, 7, 64, *lengths]), label="nbytes")
        if draw(st.booleans(), label="fill"):
            builder.fill(np.array([at], np.int64), nbytes, rng.integers(0, 2**63, 1, np.uint64)[0])
        else:
            builder.copy(np.array([at], np.int64), nbytes, rng.integers(0, 256, nbytes, np.uint8))
        at += nbytes + draw(st.integers(0, 9), label="gap")
    slots = draw(st.lists(st.integers(0, 9), unique=True, max_size=9), label="slots")
    if not slots:
        return builder.build()
    scatter_map = np.array([(0, 8, 0, 8), (128, 20, 8, 20)], SCATTER_MAP)
    data = rng.integers(0, 256, (len(slots), 28), np.uint8)
    plan, records = builder.build(), Records(np.array(slots, np.int32), data, scatter_map)
    return WritePlan(plan.memory, plan.writes, plan.pieces, records)


def effect(plan):
    buffer = np.zeros(SIZE, np.uint8)
    apply_to_host(plan, buffer)
    return buffer


@settings(deadline=None)
@given(plans())
def test_a_block_holds_its_plan(plan):
    packed = Packed.of(plan)
    block = np.full(packed.nbytes, 0xCB, np.uint8)
    packed.fill(block, plan)
    assert all(at % 16 == 0 for at in (packed.slots_at, packed.records_at, packed.payload_at))
    got, scatter_map = (
        np.zeros(SIZE, np.uint8),
        np.zeros(0, SCATTER_MAP) if plan.records is None else plan.records.scatter_map,
    )
    apply_packed(packed, block, scatter_map, got)
    np.testing.assert_array_equal(got, effect(plan))


@settings(deadline=None)
@given(plans())
def test_a_cut_plan_has_short_rows_and_the_same_effect(plan):
    cut = cut_long_writes(plan)
    assert len(cut.writes) == 0 or int(cut.writes["nbytes"].max()) <= LONGEST_WRITE
    np.testing.assert_array_equal(effect(cut), effect(plan))
