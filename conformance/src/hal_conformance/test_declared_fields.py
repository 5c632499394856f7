"""Fields that a worker declares: of every element type, width, source and group (G9 to G13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hal_core.memory.dtypes import DTYPES
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.declared import Companion, StateField
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .draw.fields import draw_fields, width_of
from .draw.requests import sizes
from .fixtures.batches import ALL, ENTER, LEAVE, draw_batch, text_of
from .fixtures.fake_group import PAIR, can_fake_group, fake_source
from .fixtures.stepping import draw_advance, draw_proposal, free_ended, run_step
from .fixtures.world import World
from .harness.backdoor import arrive
from .harness.bits import noise
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .test_submissions import A_CALL


def drawn(kit: Kit, draw: Draw) -> World:
    """A state with declared fields: the worker's (``--fields``), or some."""
    return World(kit, draw(sizes(most_slots=4), "sizes"), fields=kit.fields or draw_fields(draw))


@guarantee(9, also=(11,))
@examples()
def test_g09_declared_fields_have_the_requests_values(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    for _ in range(draw(st.integers(1, 3), "rounds")):
        tasks = draw_batch(draw, fixture, ALL)
        fixture.enter(tasks)
        fixture.check(f"insert_tasks({text_of(tasks)})")
        fixture.output(run_step(draw, fixture))
        fixture.check("save_output")
        free_ended(fixture)


@guarantee(11, also=(9,))
@examples()
def test_g11_declared_fields_are_reset_unless_they_are_kept(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    for kinds in (ENTER, LEAVE, ENTER, (*ENTER, *LEAVE)):
        tasks = draw_batch(draw, fixture, kinds, least=1)
        fixture.enter(tasks)
        fixture.check(f"insert_tasks({text_of(tasks)})")
        fixture.output(run_step(draw, fixture))
        free_ended(fixture)


@guarantee(10, requires="fused_scatter")
@examples(0.5)
def test_g10_declared_fields_take_no_submission_of_their_own(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    before = fixture.bound.counters()
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    cost = fixture.bound.counters() - before
    assert cost.submissions <= A_CALL, f"{cost.submissions} submissions, but at most {A_CALL} are due"


@guarantee(9)
@examples(0.5)
def test_g09_declared_fields_are_copied_out_with_their_groups(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    state, inputs = fixture.state, fixture.state.layout.groups["step_input"]
    ranges = {"step_input": inputs, "output": state.output_range(topk=False)}
    ranges["output_topk"] = state.output_range(topk=True)
    copied = fixture.bound.copy_out(memory=state.memory, parts=[*ranges.values()], stream=fixture.stream)
    arrive(copied)
    for (group, part), data in zip(ranges.items(), copied.data, strict=True):
        columns = state.columns(data, part)
        for name in [field.name for field in fixture.fields if group in field.groups.split()]:
            should = fixture.model.cells[name]
            assert name in columns, f"{name} of {group} is not copied out with it, as {sorted(columns)} are"
            got = columns[name]
            assert got.tobytes() == should.tobytes(), f"{name} is copied out as {got.tolist()}, not {should.tolist()}"


@guarantee(12)
@examples(0.5)
def test_g12_declared_fields_of_the_output_are_in_the_mirror(kit: Kit, draw: Draw) -> None:
    fixture = drawn(kit, draw)
    inside = [field.name for field in fixture.fields if {"output", "broadcast"} & {*field.groups.split()}]
    assert {*inside} <= fixture.state.mirror.keys(), (
        f"the mirror has {sorted(fixture.state.mirror)}, and not all of {inside}"
    )
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
    step = draw_advance(draw, fixture)
    draw_proposal(draw, fixture)
    should = fixture.mirrored()
    fixture.take(fixture.save(step))
    fixture.check_mirror(should, "a step was taken")


@guarantee(13)
@examples(0.5)
def test_g13_declared_fields_of_broadcast_are_in_the_slice(kit: Kit, draw: Draw) -> None:
    if not can_fake_group(kit):
        pytest.skip("the hook is the device's own; test_broadcast_paths.py runs it among ranks")
    fixture = World(kit, draw(sizes(), "sizes"), fields=draw_fields(draw, groups=("broadcast",)))
    part, layout = fixture.state.broadcast_range(), fixture.state.layout
    for field in fixture.fields:
        place = layout.fields[field.name]
        end = place.offset + place.stride * fixture.sizes.num_slots
        assert part.offset <= place.offset < end <= part.end, f"{field.name} lies outside the slice"
    with fake_source(fixture):
        arrive(fixture.bound.broadcast_tokens(state=fixture.state, group=PAIR, stream=fixture.stream))
    fixture.check("broadcast_tokens")


@guarantee(9, also=(11,))
@examples(0.5)
def test_g09_a_companion_has_its_own_fields_and_may_have_the_targets_slots(kit: Kit, draw: Draw) -> None:
    fields = draw_fields(draw, groups=("", "step_input"))
    for same in (False, True):
        check_companion(kit, draw, fields, same=same)


def check_companion(kit: Kit, draw: Draw, fields: Sequence[StateField], *, same: bool) -> None:
    """Compare a companion with declared fields, and with the target's slots if ``same``, with its model."""
    fixture = World(kit, draw(sizes(), "sizes"), companions=[Companion("proposer", fields, same_slots=same)])
    fixture.extra = tuple([field for field in fields if field.value == "extra"])
    (other,) = fixture.others
    for _ in range(draw(st.integers(1, 3), "rounds")):
        tasks = draw_batch(draw, fixture, ALL)
        fixture.enter(tasks)
        entered = {task.request.admission_id: task.slot for task in tasks if task.kind in ENTER}
        if same:
            assert entered.items() <= other.slots.items(), f"slots are {other.slots}, but should be {entered}"
        fixture.check(f"insert_tasks({text_of(tasks)})")
        fixture.output(run_step(draw, fixture))
        free_ended(fixture)


SIZES = StateConfig(
    num_slots=9,
    max_model_len=14,
    block_size=3,
    max_draft_tokens=2,
    max_logprobs=2,
    max_eos=4,
    max_stop_sequences=2,
    max_stop_length=3,
    max_bad_words=6,
    vocab_size=11,
)
ROWS: tuple[int | str, ...] = (2, 3, "max_blocks", 7, "max_accept", "max_eos", "max_bad_words",
        "max_stop_sequences", "max_stop_length", "max_logprobs", "max_draft_tokens", "block_size", "max_model_len",
        "vocab_size")  # fmt: skip
"""Widths, odd ones too, so that fields of a few bytes begin where no wider type could."""
OF_STEPS = ("output", "step_input", "broadcast", "", "output_topk", "broadcast_speculative", "step_input output")
OF_COMPANIONS = ("", "step_input")
FLOATS = {"float16": (65504.0, 2.0**-24), "bfloat16": (3e38, 1e-40), "float32": (3.4e38, 1e-45),
          "float64": (1.7e308, 5e-324)}  # fmt: skip


def values_of(dtype: str) -> list[Any]:
    """Return the ends of a type, and some values between."""
    if dtype == "bool":
        return [True, False, True]
    if dtype in FLOATS:
        large, small = FLOATS[dtype]
        return [large, -0.0, -large, small, 0.5, -small, 0.0]
    bits, signed = int(dtype.removeprefix("u")[3:]), not dtype.startswith("u")
    high = 2 ** (bits - signed) - 1
    return [high, -high - 1 if signed else 0, high // 3, 1, high - 1, high // 2 + 1]


def fields_of(groups: tuple[str, ...], *, kept: bool) -> list[StateField]:
    """Return six fields of every type: a number and a row from the request, from a function, and from steps alone."""
    found, rows, places = [], cycle(ROWS), cycle(groups)
    for dtype in DTYPES:
        for at, source in enumerate(("extra", "function", "step")):
            for width in (1, next(rows)):
                name = f"{dtype.name}_{source}_{'row' if width != 1 else 'number'}"
                reset = values_of(dtype.name)[(at + (width != 1)) % 3]
                value: Any = {"extra": "extra", "function": brought(name), "step": None}[source]
                stays = kept and (at + (width != 1)) % 2 == 0
                found.append(StateField(name, dtype.name, width, reset, next(places), value, stays))
    return found


def brought(name: str) -> Callable[[Request], object]:
    """Return a function of the request that gives its value of a name."""
    return lambda request: request.extra[name]


def extra_of(fields: list[StateField], turn: int) -> dict[str, Any]:
    """Return the values of a request: another end of each type, rows from empty to full."""
    found: dict[str, Any] = {}
    for at, field in enumerate(fields):
        values = values_of(field.dtype)
        turned = [values[(at + turn + k) % len(values)] for k in range(width_of(field, SIZES))]
        found[field.name] = turned[0] if field.width == 1 else turned[: (at + turn) % (len(turned) + 1)]
    return found


class Declared:
    """A state with all these fields, and companions that have them too."""

    def __init__(self, kit: Kit, *, kept: bool, companions: bool) -> None:
        self.kit, self.turn = kit, 0
        own, of_others = fields_of(OF_STEPS, kept=kept), fields_of(OF_COMPANIONS, kept=kept)
        two = [Companion("same", of_others, same_slots=True), Companion("other", of_others[::-1])]
        declared = two if companions else []
        self.fixture = World(kit, SIZES, fields=own, companions=declared)
        self.brought = own

    def enter(self, slot: int) -> Task:
        """Return a new request, prefilled whole, in part, or handed over."""
        self.turn += 1
        params, how = SamplingParams(max_tokens=9), self.turn % 3
        role = SplitRole.DECODE if how == 2 else SplitRole.MIXED
        requested = Request(self.fixture.new_name(), [1, 2, 3, 4], params, (), role, extra_of(self.brought, self.turn))
        one = self.fixture.admit(requested)
        if how == 2:
            return Task(TaskKind.REMOTE_PREFILL, slot, one, 4, 0, [slot, 9], first_token=3, drafts=[4])
        return Task(TaskKind.PREFILL, slot, one, 0, 4 if how else 2, [slot, 8])

    def insert(self, tasks: list[Task], what: str) -> None:
        """Insert a batch in at most two submissions, and compare every byte of every state."""
        before = self.fixture.bound.counters()
        ticket = self.fixture.insert(tasks)
        cost = (self.fixture.bound.counters() - before).submissions
        if self.kit.capabilities.fused_scatter:
            assert cost <= A_CALL, f"{what}: {cost} submissions, but at most {A_CALL} are due"
        arrive(ticket, what)
        self.fixture.check(what)

    def step(self, *, speculative: bool, logprobs: int | None) -> None:
        """Run a step that writes the fields of steps, and compare its record and the host's mirror."""
        fixture = self.fixture
        n, most = SIZES.num_slots, SIZES.max_accept
        alternatives = np.arange(n * most * (SIZES.max_logprobs + 1)).reshape(n, most, -1) % SIZES.vocab_size
        alternatives[:, :, 0] = 5 if speculative else 6
        sampled: dict[str, Any] = {
            "sampled_token_ids": np.full(n, 6), "accept_tokens": np.full((n, most), 5), "accept_num": np.full(n, 2),
            "topk_token_ids": alternatives, "topk_logprobs": np.zeros(alternatives.size, np.float32),
            "topk_ranks": np.arange(n * most),
        }  # fmt: skip
        for at, field in enumerate(self.brought):
            if field.value is None:
                cells = fixture.model.cells[field.name]
                bits = noise(at + self.turn, cells.nbytes) & (1 if field.dtype == "bool" else 255)
                sampled[field.name] = bits.view(cells.dtype)
        fixture.put(sampled)
        step = fixture.advance([4, 0, 8, 3, 1, 2], speculative=speculative, logprobs=logprobs)
        fixture.check("a step beside declared fields")
        should = fixture.mirrored()
        fixture.take(fixture.save(step))
        fixture.check_mirror(should, "a step was taken")
        self.fixture.check("the output of a step")


@guarantee(9, also=(10, 11, 12, 18))
@pytest.mark.parametrize("companions", [False, True], ids=["alone", "companions"])
@pytest.mark.parametrize("kept", [False, True], ids=["reset", "kept"])
def test_g09_fields_of_every_type_enter_leave_and_enter_again(kit: Kit, kept: bool, companions: bool) -> None:
    one = Declared(kit, kept=kept, companions=companions)
    fixture = one.fixture
    inside = {field.name for field in one.brought if {*field.groups.split()} & {"output", "broadcast"}}
    assert inside <= fixture.state.mirror.keys(), f"the mirror has not all of {sorted(inside)}"
    one.insert([one.enter(slot) for slot in (3, 0, 8, 1, 4)], "requests that bring every type")
    one.step(speculative=True, logprobs=2)
    held = fixture.model.residents
    more = [Task(TaskKind.MORE_BLOCKS, slot, held[slot].admitted, blocks=[7], first_block=2) for slot in (3, 4)]
    one.insert([*more, one.enter(2)], "more blocks, and one that enters")
    one.step(speculative=False, logprobs=None)
    gone = [*fixture.leaving([0, 2], TaskKind.PREEMPTED), *fixture.leaving([1, 3], TaskKind.ABORTED)]
    one.insert([*gone, one.enter(2), one.enter(3)], "requests that leave, and two that enter at once")
    fixture.release([4])
    one.step(speculative=True, logprobs=0)
    one.insert([one.enter(slot) for slot in (1, 4, 0)], "requests that enter where others have left")
    one.step(speculative=False, logprobs=1)


@guarantee(13, also=(14,))
@pytest.mark.parametrize("drafts", [0, 2], ids=["plain", "drafts"])
def test_g13_broadcast_fields_of_every_type_are_in_the_slice(kit: Kit, drafts: int) -> None:
    if not can_fake_group(kit):
        pytest.skip("the hook is the device's own; test_broadcast_paths.py runs it among ranks")
    size = StateConfig(num_slots=5, max_model_len=9, max_draft_tokens=drafts, max_logprobs=1)
    groups = ("broadcast", "broadcast_speculative") if drafts else ("broadcast",)
    fields = [
        StateField(f"field_{at}", dtype.name, 1 + at % 4, groups=groups[at % len(groups)])
        for at, dtype in enumerate(DTYPES)
    ]
    fixture = World(kit, size, fields=fields)
    part, layout = fixture.state.broadcast_range(), fixture.state.layout
    for name in [field.name for field in fields]:
        place = layout.fields[name]
        end = place.offset + place.stride * size.num_slots
        assert part.offset <= place.offset < end <= part.end, f"{name} lies outside the slice"
    for turn in range(2):
        with fake_source(fixture):
            arrive(fixture.bound.broadcast_tokens(state=fixture.state, group=PAIR, stream=fixture.stream))
        fixture.check(f"broadcast {turn} of declared fields of every type")
