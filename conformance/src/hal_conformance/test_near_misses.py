"""Near misses: rows that share a long head or tail, requests of one name, blocks of
one prefix (G9, G11), and device values of permuted strides (G6)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.slots.fields import FinishReason, StateConfig
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.large_blocks import LargeBlock
from .fixtures.sizes import sizes
from .fixtures.world import World
from .harness.bits import noise
from .harness.guarantees import guarantee
from .kit import Kit

Row = tuple[int, ...]


def replaced(row: Row, at: int) -> Row:
    return (*row[:at], row[at] + 1, *row[at + 1 :])


NEAR: dict[str, Callable[[Row], Row]] = {
    "its first": lambda row: replaced(row, 0),
    "its second": lambda row: replaced(row, 1),
    "one in its middle": lambda row: replaced(row, len(row) // 2),
    "its last but one": lambda row: replaced(row, len(row) - 2),
    "its last": lambda row: replaced(row, len(row) - 1),
    "two that have changed places": lambda row: (*row[:-2], row[-1], row[-2]),
    "its first two, which have changed places": lambda row: (
        row[1],
        row[0],
        *row[2:],
    ),  # the same end, and the same sum
    "the first and the last": lambda row: (row[0] + 1, *row[1:-1], row[-1] - 1),  # the same sum
    "the last, which it lacks": lambda row: row[:-1],
    "the first, which it lacks": lambda row: row[1:],
}
"""The difference between two rows."""


def entering(fixture: World, slot: int, row: Row, name: str = "", turn: int = 0) -> Task:
    """Return the task of a request whose tokens, blocks, stop sequence, bad words and end tokens are one row; each of
    its numbers is of its ``turn``."""
    two, part = (row, row[-2:]), (1 + turn) / 8
    numbers: dict[str, Any] = {
        "temperature": part,
        "top_k": turn,
        "top_p": 1 - part,
        "min_p": part,
        "seed": turn,
        "repetition_penalty": 1 + part,
        "frequency_penalty": part,
        "presence_penalty": -part,
        "min_tokens": turn,
        "max_tokens": 9 + turn + len(row),
    }
    return fixture.entering(
        slot, row, name=name, blocks=row, stop_sequences=two, bad_words=row, eos_token_ids=row, **numbers
    )


def wide(length: int, slots: int) -> StateConfig:
    return StateConfig(
        slots, 2 * length, 1, max_draft_tokens=0, max_logprobs=0, max_eos=length, max_stop_sequences=2,
        max_stop_length=length, max_bad_words=length,
    )  # fmt: skip


@guarantee(9, also=(11, 19))
@pytest.mark.parametrize("names", ["each its own", "used again"])
@pytest.mark.parametrize("where", ["the same slot at once", "the same slot", "another slot"])
def test_g09_requests_that_nearly_equal_others_are_each_their_own(kit: Kit, where: str, names: str) -> None:
    """In one batch, and one after the other in a slot: a row's head or tail, or a name, identifies nothing."""
    for length in sizes(kit, "tokens or blocks that a row shares with another"):
        fixture, row = World(kit, wide(length, 2 * len(NEAR))), tuple(range(100, 100 + length))
        for turn in range(3):  # each with its neighbours', and then its own again
            gone = fixture.leaving(fixture.model.residents, TaskKind.ABORTED)
            if where != "the same slot at once":
                fixture.enter(gone)
                gone = []
            for at, near in enumerate(NEAR.values()):
                slot, name = 2 * at + turn % 2 * (where == "another slot"), f"again-{at}" if "again" in names else ""
                gone.append(entering(fixture, slot, row if (at + turn) % 2 else near(row), name, turn))
            fixture.enter(gone)
            fixture.check(f"requests that differ by one of {length} tokens followed others in {where}, names {names}")
            fixture.output(fixture.step(range(2 * len(NEAR))))


@guarantee(9, also=(12, 25))
@pytest.mark.parametrize("several", [False, True], ids=["one a step", "several a step"])
def test_g09_a_sequence_but_for_one_token_ends_nothing(kit: Kit, several: bool) -> None:
    """Output that is a long stop sequence but for one token does not end; the last slot's is the sequence, and ends."""
    length, most = 40, 8
    row = tuple(range(100, 100 + length))
    given = [near(row) for near in NEAR.values() if len(near(row)) == length] + [row]
    n = len(given)
    size = StateConfig(
        n, 3 * length, 8, max_draft_tokens=most - 1, max_logprobs=0, max_stop_sequences=2, max_stop_length=length
    )
    fixture = World(kit, size)
    fixture.enter(
        fixture.entering(slot, (1, 2), blocks=range(9), stop_sequences=((5, 6), row), max_tokens=length + 2)
        for slot in range(n)
    )
    at = 0
    while at < length:
        count = min(most if several and at else 1, length - at)
        tokens = np.array([(*one[at : at + count], *[7] * (most - count)) for one in given])
        fixture.put({"sampled_token_ids": tokens[:, 0], "accept_tokens": tokens, "accept_num": np.full(n, count)})
        at += count
        rows = fixture.output(fixture.advance(range(n), speculative=several))
        fixture.check(f"{at} tokens of output that is nearly a stop sequence")
    ended = [slot for slot, one in enumerate(rows) if one.finish is FinishReason.STOP]
    assert ended == [n - 1], f"the kit's own rows end in {ended}"


@guarantee(9, also=(11, 19, 24))
@pytest.mark.parametrize("kind", [TaskKind.PREEMPTED, TaskKind.ABORTED], ids=lambda kind: kind.name.lower())
def test_g09_slots_that_share_a_prefix_keep_it_when_one_leaves(kit: Kit, kind: TaskKind) -> None:
    """Cached blocks in several slots: one request leaves, one follows in its slot with the same prefix, others step."""
    fixture = World(kit, StateConfig(4, 64, 4, max_draft_tokens=2, max_logprobs=0))
    prefix, shared = tuple(range(30, 50)), (9, 4, 7, 2, 11)

    def cached(slot: int, turn: int) -> Task:
        tokens = (*prefix, slot + 10 * turn, 3)
        request = fixture.entering(slot, tokens, max_tokens=20).request
        return Task(TaskKind.PREFILL, slot, request, len(prefix), 2, [*shared, 20 + slot + 10 * turn])

    fixture.enter(cached(slot, 0) for slot in range(3))
    fixture.check("requests of one prefix")
    for turn, slot in enumerate((0, 2, 1), 1):
        fixture.put({"sampled_token_ids": np.arange(4) + 60 + turn})
        step = fixture.advance([2, 0, 1])
        fixture.enter(fixture.leaving([slot], kind))
        fixture.check(f"the request of slot {slot} left its prefix to others")
        fixture.output(step)
        fixture.enter([cached(slot, turn)])
        fixture.check(f"another request of the same prefix entered slot {slot}")
        more = (
            [
                Task(
                    TaskKind.MORE_BLOCKS,
                    3 - slot,
                    fixture.model.residents[3 - slot].admitted,
                    blocks=[shared[turn]],
                    first_block=6,
                )
            ]
            if slot
            else []
        )
        fixture.enter(more)
        fixture.check("one of its blocks was given to another slot once more")


@guarantee(9, also=(12, 25))
def test_g09_a_longer_sequence_but_for_one_token_ends_nothing(kit: Kit) -> None:
    """Most of it is earlier output; its last tokens come in one step."""
    for length in sizes(kit, "tokens of a stop sequence"):
        most, row = 8, tuple(range(100, 100 + length))
        given = [near(row) for near in NEAR.values() if len(near(row)) == length] + [row]
        n = len(given)
        size = StateConfig(
            n, 2 * length, 8, max_draft_tokens=most - 1, max_logprobs=0, max_stop_sequences=2, max_stop_length=length
        )
        fixture = World(kit, size)
        stops: dict[str, Any] = {"stop_sequences": ((5, 6), row), "max_tokens": length + 2}
        fixture.enter(
            fixture.entering(slot, (1, 2), output=one[: length - most], blocks=range(length // 8 + 1), **stops)
            for slot, one in enumerate(given)
        )
        tokens = np.array([one[length - most :] for one in given])
        fixture.put({"sampled_token_ids": tokens[:, 0], "accept_tokens": tokens, "accept_num": np.full(n, most)})
        rows = fixture.output(fixture.advance(range(n), speculative=True))
        fixture.check(f"output that is a stop sequence of {length} tokens but for one")
        ended = [slot for slot, one in enumerate(rows) if one.finish is FinishReason.STOP]
        assert ended == [n - 1], f"the kit's own rows end in {ended}"


TWO = (5, 6)
"""The tokens of sequences and output that contain and overlap themselves."""


@guarantee(9, also=(12, 25))
@pytest.mark.parametrize("several", [False, True], ids=["one a step", "several a step"])
def test_g09_a_sequence_of_two_tokens_ends_output_of_the_same_two(kit: Kit, several: bool) -> None:
    """Every sequence of two to five; output that has begun one meets it or another beginning of it."""
    stops, rng = [one for length in range(2, 6) for one in product(TWO, repeat=length)], np.random.default_rng(7)
    n, most = len(stops), 4 if several else 1
    fixture = World(kit, StateConfig(n, 32, 8, max_draft_tokens=3, max_logprobs=0, max_stop_length=5))
    fixture.enter(
        fixture.entering(slot, (TWO[0], 2), blocks=range(4), stop_sequences=(stop,), max_tokens=20)
        for slot, stop in enumerate(stops)
    )
    ended = set[int]()
    for at in range(16 // most):
        tokens = rng.choice(TWO, (n, 4))
        count = min(most, 1 + 3 * at)  # the first step ends the prompts
        fixture.put({"sampled_token_ids": tokens[:, 0], "accept_tokens": tokens, "accept_num": np.full(n, count)})
        rows = fixture.output(fixture.advance(range(n), speculative=several))
        fixture.check(f"step {at} of output of two tokens")
        ended |= {slot for slot, row in enumerate(rows) if row.finish is FinishReason.STOP}
    assert len(ended) > n // 4, f"the kit's own rows end in {len(ended)} of {n} slots"


FEW = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
"""Elements of small writes: of no word, one, and some with a head and a tail."""
WORD = 16
"""Bytes of the widest word of a device that has a way of its own for aligned bytes."""


@guarantee(6, also=(5,))
@pytest.mark.parametrize("form", ["a scalar", "an array"])
@pytest.mark.parametrize("into", ["uint8", "int16", "int32", "int64"])
def test_g06_few_elements_are_written_at_each_place_in_a_word(kit: Kit, into: str, form: str) -> None:
    item = dtype_of(into).itemsize
    cell = WORD * (2 + max(FEW) * item // WORD)
    block = LargeBlock(kit, cell * len(FEW))
    for place in range(0, WORD, item):
        for at, count in enumerate(FEW):
            value = 1 + at if form == "a scalar" else np.arange(count, dtype=block.at(0, (1,), into).dtype.storage)
            target = block.at(cell * at + place, (count,), into)
            block.write(target, value)
        block.check(f"{form} for {FEW} elements of {into}, each {place} bytes past a word")


TURNED = ((2, 3), (4, 3, 2), (2, 3, 2, 2))
"""Shapes of device values, whose axes are permuted."""
INTO: tuple[tuple[int, ...], ...] = ((-1,), (2, -1), (-1, 2))
"""Shapes of their targets besides the value's own; -1 is the rest."""


@guarantee(5, also=(6,))
@pytest.mark.parametrize("into", ["int64", "int16", "uint8"])
@pytest.mark.parametrize("apart", [1, 2], ids=["side by side", "apart"])
def test_g05_a_target_of_permuted_strides_takes_an_array_in_row_major_order(kit: Kit, apart: int, into: str) -> None:
    """Each order of its axes: also where the places of the first two elements and of the last fit an even row."""
    item = dtype_of(into).itemsize
    block = LargeBlock(kit, 2048)
    for shape in (*TURNED, (2, 2, 3), (3, 2, 2), (2, 2, 2, 3)):
        for turn, order in enumerate(permutations(range(len(shape)))):
            steps = [apart * item * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
            mine, strides = (tuple(of[axis] for axis in order) for of in (shape, steps))
            target = View(block.memory, 8 * turn, mine, strides, dtype_of(into))
            value = np.arange(turn, turn + target.size).astype(target.dtype.storage).reshape(mine)
            block.write(target, value)
            block.check(f"an array for a target of shape {mine} and strides {strides}")


@guarantee(6, also=(5,))
@pytest.mark.parametrize("into", ["int64", "int16", "uint8"])
def test_g06_a_device_value_of_permuted_strides_is_reshaped_in_row_major_order(kit: Kit, into: str) -> None:
    """Each order of its axes, forwards and backwards, for targets of the value's shape and of others."""
    dtype, item = dtype_of(into), dtype_of(into).itemsize
    block, source = LargeBlock(kit, 2048), LargeBlock(kit, 1024, noise(3, 1024))
    for shape in TURNED:
        full = source.at(32, shape, into)
        for order in permutations(range(len(shape))):
            for step in (1, -1):
                turned = full[tuple(slice(None, None, step) for _ in shape)]
                mine, strides = (tuple(of[axis] for axis in order) for of in (turned.shape, turned.strides))
                value = View(source.memory, turned.offset, mine, strides, dtype)
                should = np.ascontiguousarray(source.over(value)).reshape(-1)
                for there in (mine, *(should.reshape(other).shape for other in INTO)):
                    steps = tuple(3 * item * int(np.prod(there[axis + 1 :])) for axis in range(len(there)))
                    place = len(order) * order[0] + order[-1]
                    for target in (block.at(place, there, into), View(block.memory, 512 + place, there, steps, dtype)):
                        block.write(target, value, should.reshape(there))
                block.check(f"device values of shape {mine} and strides {strides} for targets of other shapes")
