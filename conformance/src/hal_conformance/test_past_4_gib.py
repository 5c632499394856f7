"""Offsets past 2 and 4 GiB: of copies out (G1), of targets, device values and records (G5)."""

from __future__ import annotations

import numpy as np
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import SCATTER_MAP, WRITE, Records, WritePlan
from hal_core.memory.views import View

from .fixtures.large_blocks import elements
from .fixtures.large_offsets import BORDERS, HugeBlock
from .harness.backdoor import arrive
from .harness.bits import noise
from .harness.guarantees import guarantee
from .kit import Kit


@guarantee(1)
def test_g01_what_is_copied_out_past_4_gib_lies_there(kit: Kit, huge_block: HugeBlock) -> None:
    """Every window has different bytes; they are copied together, and one by one."""
    huge_block.tell_apart()
    huge_block.check("every window was given other bytes")
    for begin, part in zip(huge_block.windows, huge_block.parts(), strict=True):
        copied = kit.device.copy_out(huge_block.memory, [part], huge_block.stream)
        huge_block.compare(copied, [begin], "every window was given other bytes, and one was copied")


@guarantee(5)
def test_g05_offsets_past_4_gib_are_not_cut(kit: Kit, huge_block: HugeBlock) -> None:
    huge_block.check("writing by a plan around 2 GiB, 4 GiB and the end")
    kind, memory = dtype_of("int32"), huge_block.memory
    for turn, (name, border) in enumerate(BORDERS.items()):
        target = View.contiguous(memory, border - 16, (8,), kind)
        value = np.arange(100 * turn, 100 * turn + 8, dtype=np.int32)
        huge_block.set(target, value, [item.tobytes() for item in value])
        huge_block.check(f"an array across {name}")
        target = View(memory, border + 64, (6,), (-8,), kind)
        huge_block.set(target, 7 + turn, [np.int32(7 + turn).tobytes()] * 6)
        huge_block.check(f"a scalar, backwards, past {name}")
    for step in (1 << 31, 1 << 32):
        target = View(memory, 256, (2,), (step,), kind)
        huge_block.set(target, [step >> 20, 2], [np.int32(step >> 20).tobytes(), np.int32(2).tobytes()])
        target = View(memory, 512 + step, (2, 2), (-step, 4), kind)
        huge_block.set(target, 5, [np.int32(5).tobytes()] * 4)
        huge_block.check(f"strides of {step} bytes")


@guarantee(5)
def test_g05_device_values_and_records_past_4_gib_are_not_cut(kit: Kit, huge_block: HugeBlock) -> None:
    kind, memory = dtype_of("int64"), huge_block.memory
    below, above = View.contiguous(memory, 1024, (8,), kind), View.contiguous(memory, (1 << 32) + 1032, (8,), kind)
    value = elements(16, (8,), kind)
    huge_block.set(below, value, [item.tobytes() for item in value])
    huge_block.set(above, below, [item.tobytes() for item in value])
    huge_block.check("a device value from below to past 4 GiB")
    other = elements(17, (8,), kind)
    huge_block.set(above, other, [item.tobytes() for item in other])
    huge_block.set(below, above[::-1], [item.tobytes() for item in other[::-1]])
    huge_block.check("a device value from past 4 GiB to below")
    stride = 1 << 30  # a slot's share: with it slot 4 is beyond 32 bits
    records = Records(
        np.array([4, 0, 2], np.int32), noise(18, 3 * 16).reshape(3, 16), np.array([(320, stride, 0, 16)], SCATTER_MAP)
    )
    plan = WritePlan(memory, np.zeros(0, WRITE), [], records)
    arrive(kit.device.submit(plan, huge_block.stream))
    for slot, record in zip((4, 0, 2), records.data, strict=True):
        huge_block.expect(320 + slot * stride, record.tobytes())
    huge_block.check("records of slots past 4 GiB")
