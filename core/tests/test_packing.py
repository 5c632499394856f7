"""Staging blocks: a plan packed, cut and split has the effect that the plan has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hal_core.packing import ROW, Packed, cut_rows, split
from hal_core.plan import SPREAD, WRITE, PlanBuilder, Records, WritePlan, apply_to_host
from hypothesis import given
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
    for _ in range(draw(st.integers(0, 6), label="writes")):
        nbytes = draw(st.sampled_from([1, 7, 64, ROW, ROW + 5, 2 * ROW + 8]), label="nbytes")
        if draw(st.booleans(), label="fill"):
            builder.fill(np.array([at], np.int64), nbytes, rng.integers(0, 2**63, 1, np.uint64)[0])
        else:
            builder.copy(np.array([at], np.int64), nbytes, rng.integers(0, 256, nbytes, np.uint8))
        at += nbytes + draw(st.integers(0, 9), label="gap")
    slots = draw(st.lists(st.integers(0, 9), unique=True, max_size=9), label="slots")
    if not slots:
        return builder.build()
    spread = np.array([(0, 8, 0, 8), (128, 20, 8, 20)], SPREAD)
    data = rng.integers(0, 256, (len(slots), 28), np.uint8)
    return builder.build(Records(np.array(slots, np.int32), data, spread))


def effect(*parts):
    buffer = np.zeros(SIZE, np.uint8)
    for part in parts:
        apply_to_host(part, buffer)
    return buffer


def from_block(plan, packed, block):
    """The plan as a device reads it from its block."""
    writes = np.frombuffer(block[: packed.writes * WRITE.itemsize].tobytes(), WRITE)
    records = None
    if plan.records is not None:
        slots = np.frombuffer(block[packed.slots_at : packed.slots_at + 4 * packed.records].tobytes(), np.int32)
        end = packed.records_at + packed.records * packed.record_bytes
        data = block[packed.records_at : end].reshape(packed.records, packed.record_bytes)
        records = Records(slots, data, plan.records.spread)
    return WritePlan(plan.memory, writes, [block[packed.payload_at :]], records)


@given(plans())
def test_a_block_holds_its_plan(plan):
    packed = Packed.of(plan)
    block = np.full(packed.nbytes, 0xCB, np.uint8)
    packed.fill(block, plan)
    assert all(at % 16 == 0 for at in (packed.slots_at, packed.records_at, packed.payload_at))
    np.testing.assert_array_equal(effect(from_block(plan, packed, block)), effect(plan))


@given(plans())
def test_a_cut_plan_has_short_rows_and_the_same_effect(plan):
    cut = cut_rows(plan)
    assert len(cut.writes) == 0 or int(cut.writes["nbytes"].max()) <= ROW
    np.testing.assert_array_equal(effect(cut), effect(plan))


@given(plans(), st.sampled_from([20 << 10, 40 << 10, 1 << 20]))
def test_g10_a_split_plan_fits_the_ring_and_has_the_same_effect(plan, limit):
    parts = list(split(plan, limit))
    assert all(Packed.of(part).nbytes <= limit for part in parts)
    np.testing.assert_array_equal(effect(*parts), effect(plan))
    if Packed.of(plan).nbytes <= limit:
        assert parts == [plan]
