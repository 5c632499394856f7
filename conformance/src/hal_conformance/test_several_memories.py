"""``device.write``: one plan over several memories, exact to the byte (G5) and one submission (G10)."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.memory.writes import Writes
from hypothesis import strategies as st

from .harness import backdoor
from .harness.backdoor import PATIENCE, poisoned
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .test_submissions import A_CALL

TYPES = ("bool", "uint8", "int16", "int32", "int64", "float32")
MOST = 40
"""Bytes of each memory: 8 rows of at most 5."""


class Blocks:
    """Memories of their own, each with the bytes that it must have."""

    def __init__(self, kit: Kit, count: int) -> None:
        self.kit, self.stream = kit, kit.device.default_stream
        self.memories = [kit.device.allocate(8 * MOST) for _ in range(count)]
        self.should = [poisoned(8 * MOST) for _ in self.memories]
        for memory, block in zip(self.memories, self.should, strict=True):
            backdoor.write(kit.device, memory, 0, block, self.stream)

    def view(self, number: int, slots: int, width: int, dtype: str) -> tuple[View, np.ndarray]:
        """A view ``[slots, width]`` of a memory, and the array that it must equal."""
        kind = dtype_of(dtype)
        view = View.contiguous(self.memories[number], 8, (slots, width), kind)
        part = self.should[number][8 : 8 + slots * width * kind.itemsize]
        return view, part.view(kind.storage).reshape(slots, width)

    def check(self) -> None:
        """Compare every byte of every memory."""
        __tracebackhide__ = True
        for number, (memory, block) in enumerate(zip(self.memories, self.should, strict=True)):
            got = backdoor.read(self.kit.device, memory, self.stream)
            wrong = np.flatnonzero(got[: len(block)] != block)
            assert not len(wrong), (
                f"byte {wrong[0]} of memory {number} is {got[wrong[0]]}, but should be {block[wrong[0]]}"
            )


def draw_writes(draw: Draw, blocks: Blocks) -> Writes:
    """Writes of each kind to each memory, made in the expected arrays as well."""
    writes = Writes()
    for number in range(len(blocks.memories)):
        dtype = draw(st.sampled_from(TYPES), f"type of memory {number}")
        slots, width = draw(st.integers(1, 5), "slots"), draw(st.integers(1, 5), "width")
        view, cells = blocks.view(number, slots, width, dtype)
        some = draw(st.lists(st.integers(0, slots - 1), unique=True, min_size=1), "slots written")
        kind = draw(st.sampled_from(["set", "fill", "rows", "ragged"]), f"write to memory {number}")
        if kind == "set":
            writes.set(view[some[0]], cells.dtype.type(1).item())
            cells[some[0]] = 1
        elif kind == "fill":
            begins = [draw(st.integers(0, width), "first element") for _ in some]
            if draw(st.booleans(), "one first element for all"):
                begins = begins[:1] * len(some)
            same = begins[0] if len({*begins}) == 1 else np.array(begins)
            writes.fill(view, some, cells.dtype.type(1).item(), same)
            for slot, begin in zip(some, begins, strict=True):
                cells[slot, begin:] = 1
        elif kind == "rows":
            values = (np.arange(len(some) * width) % 2).astype(cells.dtype).reshape(len(some), width)
            writes.rows(view, some, values)
            cells[some] = values
        else:
            rows = [np.ones(draw(st.integers(0, width), "length"), cells.dtype) for _ in some]
            writes.ragged(view, some, np.concatenate(rows), [*map(len, rows)])
            for slot, row in zip(some, rows, strict=True):
                cells[slot, : len(row)] = row
    return writes


@guarantee(5)
@examples()
def test_g05_writes_to_several_memories_change_nothing_else(kit: Kit, draw: Draw) -> None:
    blocks = Blocks(kit, draw(st.integers(1, 5), "memories"))
    writes = draw_writes(draw, blocks)
    kit.bound.write(writes=writes, stream=blocks.stream).wait(PATIENCE)
    blocks.check()


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_several_memories_are_one_submission(kit: Kit, draw: Draw) -> None:
    """Or one for each memory, if the device's kernels take no addresses."""
    blocks = Blocks(kit, 5)
    writes = draw_writes(draw, blocks)
    before = kit.bound.counters()
    ticket = kit.bound.write(writes=writes, stream=blocks.stream)
    cost = kit.bound.counters() - before
    ticket.wait(PATIENCE)
    due = A_CALL if kit.bound.capabilities.several_memories else A_CALL * 5
    assert cost.submissions <= due, f"{cost.submissions} submissions for five memories, but at most {due} are due"
    blocks.check()


@guarantee(26)
def test_g26_memories_that_overlap_are_refused_and_nothing_changes(kit: Kit) -> None:
    blocks, writes = Blocks(kit, 1), Writes()
    view, _ = blocks.view(0, 4, 2, "int32")
    memory = view.memory

    class Twin:
        device, address, nbytes = memory.device, memory.address, memory.nbytes

    writes.set(view, 1)
    writes.set(View.contiguous(Twin(), 0, (2,), view.dtype), 2)
    with pytest.raises(InvalidValue, match="two targets share memory"):
        kit.bound.write(writes=writes, stream=blocks.stream)
    blocks.check()
