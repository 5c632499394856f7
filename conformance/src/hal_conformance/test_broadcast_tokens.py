"""``broadcast_tokens`` (G14, G15), and a broadcast that is pending while its step is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
from hal_core.contract.counters import Counters
from hal_core.errors import StateUnusable
from hal_core.group import Group
from hal_core.output.sinks import complete_with
from hal_core.output.ticket import OutputTicket
from hal_core.slots.fields import HEADER_BYTES, StateConfig
from hal_core.slots.layout import lay_out
from hal_core.tickets import PromiseTicket
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ENTER, draw_batch, draw_world
from .fixtures.fake_group import can_fake_group
from .fixtures.forms import ALL, AT_ONCE, FALLING, LATE, SOME, Form, advance, working
from .fixtures.stepping import draw_sampling, draw_step
from .fixtures.world import Outputs, World
from .harness import backdoor
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .kit import Draw, Kit, examples

if TYPE_CHECKING:
    from hal_core.memory.views import ByteRange, Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


@contextmanager
def nobody_met(kit: Kit) -> Iterator[None]:
    """Context in which the device may not open a group: one rank has nobody to meet."""
    device: Any = kit.device
    device.communicator = meet
    try:
        yield
    finally:
        del device.communicator


def meet(group: Group) -> NoReturn:
    """Refuse to open a group."""
    raise AssertionError(f"a group of one asked for a communicator of {group}")


@guarantee(15)
@examples()
def test_g15_a_group_of_one_communicates_nothing(kit: Kit, draw: Draw) -> None:
    fixture = draw_world(draw, kit)
    draw_sampling(draw, fixture, draw_step(draw, fixture))
    rank = draw(st.integers(0, 9), "rank")
    group = Group((rank,), rank)
    stream = kit.device.stream() if draw(st.booleans(), "on a stream of its own") else fixture.stream

    def broadcast() -> Counters:
        with kit.held(stream, "broadcast_tokens in a group of one"):  # a device may hold it by work of its own
            before = kit.bound.counters()
            kit.bound.open_group(state=fixture.state, group=group)
            ticket = kit.bound.broadcast_tokens(state=fixture.state, group=group, stream=stream)
            assert ticket.done(), "the ticket of a group of one is not done, though there is nothing to wait for"
            counted = kit.bound.counters() - before
        arrive(ticket)
        return counted

    with nobody_met(kit):
        counted = assert_no_error(broadcast, f"broadcast_tokens in a group of rank {rank} alone")
    assert counted.host_waits == 0, f"a group of one waited {counted.host_waits} times for the device"
    assert counted.collectives == 0, f"a group of one made {counted.collectives} collectives, but should make none"
    assert counted.submissions == 0, f"a group of one made {counted.submissions} submissions, but should make none"
    fixture.check("broadcast_tokens in a group of one")


@guarantee(14)
@examples(0.5)
def test_g14_a_state_that_ranks_disagree_about_is_refused_by_every_hook(kit: Kit, draw: Draw) -> None:
    fixture = World(kit, draw(sizes(), "sizes"))
    tasks = draw_batch(draw, fixture, ENTER, least=1)
    fixture.state.mark_unusable("rank 1 sent step 4, rank 0 step 5")
    step = fixture.step([0])
    calls: dict[str, Callable[[], object]] = {
        "insert_tasks": lambda: fixture.bound.insert_tasks(state=fixture.state, tasks=tasks, stream=fixture.stream),
        "save_output": lambda: fixture.bound.save_output(
            state=fixture.state, step=step, sink=fixture.sink, stream=fixture.stream
        ),
        "broadcast_tokens": lambda: fixture.bound.broadcast_tokens(
            state=fixture.state, group=Group(), stream=fixture.stream
        ),
        "async_set_value": lambda: fixture.bound.async_set_value(
            target=fixture.state.view("seed"), value=1, stream=fixture.stream
        ),
        "update_inputs": lambda: fixture.bound.update_inputs(state=fixture.state, step=step, stream=fixture.stream),
    }
    for hook, call in calls.items():
        error = assert_raises(StateUnusable, call, f"{hook} on a state that is unusable")
        assert_says(error, device=kit.bound.name, hook=hook)
        assert "rank 1 sent step 4" in str(error), f"{error} does not explain why the state is unusable"
    assert not fixture.sink.records, "output of a state that is unusable was sent"
    fixture.check("every hook was refused")


@guarantee(14)
@examples(0.5)
def test_g14_sizes_that_differ_have_digests_that_differ(kit: Kit, draw: Draw) -> None:
    size = draw(sizes(), "sizes")
    digests = {lay_out(size).digest: size}
    for name in size.__slots__:
        for more in (1, 64):
            other = replace(size, **{name: getattr(size, name) + more})
            theirs = lay_out(other).digest
            assert theirs not in digests, f"{other} and {digests[theirs]} have one digest"
            digests[theirs] = other
    assert (
        lay_out(size).digest == lay_out(StateConfig(**{field: getattr(size, field) for field in size.__slots__})).digest
    ), "no constant"


class PendingCollectives:
    """A communicator whose other rank is simulated. Its data is there in stream order, its tickets end when told."""

    def __init__(self, group: Group, fixtures: Sequence[World]) -> None:
        self._group, self._fixtures = group, fixtures
        self.pending: list[PromiseTicket] = []
        self.wrong: int | None = None
        """The byte of the next header that arrives wrong."""

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Write the header; the fields are equal on both ranks."""
        fixture = next(one for one in self._fixtures if one.state.memory is memory)
        header = bytearray(fixture.state.channels[self._group.ranks].expected)
        if self.wrong is not None:
            header[self.wrong] ^= 1
        self.wrong = None
        fixture.model.block[part.offset : part.offset + HEADER_BYTES] = np.frombuffer(header, np.uint8)
        arrive(backdoor.put(fixture.device, memory, [(part.offset, bytes(header))], stream))
        self.pending.append(PromiseTicket("async"))
        return self.pending[-1]

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Return the same block for every rank."""
        return dict.fromkeys(self._group.ranks, block)

    def end(self) -> None:
        """End all collectives."""
        for ticket in self.pending:
            ticket.complete()
        self.pending.clear()

    def close(self) -> None:
        """Return at once."""


@contextmanager
def pending_collectives(group: Group, fixtures: Sequence[World]) -> Iterator[PendingCollectives]:
    """Context in which the device's groups have a simulated rank and pending collectives."""
    far, device = PendingCollectives(group, fixtures), fixtures[0].device
    device.communicator = lambda group: far  # type: ignore[method-assign]
    try:
        yield far
    finally:
        far.end()
        del device.communicator


FIRST, OTHER, HIGH = Group((1, 0), 1), Group((0, 1), 1), Group((5, 2), 5)


WRONG = {
    "plain, first step": (Form(False, None, ALL, FIRST, AT_ONCE), 0, 0),
    "plain, other rank, second": (Form(False, None, SOME, OTHER, LATE), 1, 17),
    "drafts, third": (Form(True, None, FALLING, HIGH, LATE), 2, 24),
    "drafts, other rank, tenth": (Form(True, None, ALL, OTHER, AT_ONCE), 9, 63),
    "no alternatives, second": (Form(False, 0, FALLING, FIRST, AT_ONCE), 1, 16),
    "no alternatives, drafts, other rank, third": (Form(True, 0, SOME, OTHER, AT_ONCE), 2, 31),
    "all alternatives, tenth": (Form(False, 2, SOME, HIGH, LATE), 9, 40),
    "all alternatives, other rank, first step": (Form(False, 2, FALLING, OTHER, AT_ONCE), 0, 20),
    "all alternatives, drafts, second": (Form(True, 2, ALL, FIRST, LATE), 1, 5),
    "no alternatives, tenth": (Form(False, 0, ALL, HIGH, AT_ONCE), 9, 32),
}
"""The form of the steps, the step whose header is wrong, and the wrong byte of it."""


@guarantee(14, also=(17, 19))
@pytest.mark.parametrize("name", WRONG)
def test_g14_an_output_whose_broadcast_ends_later_finds_a_wrong_header(kit: Kit, name: str) -> None:
    """Only the output is waited for; the steps before it, and those of another state, are delivered."""
    if not can_fake_group(kit):
        pytest.skip("the device's own broadcast_tokens may not ask communicator(), so no rank can be faked")
    (form, last, byte), worlds, outputs = WRONG[name], [working(kit), working(kit, "other")], Outputs()
    with pending_collectives(form.group, worlds) as far:
        for turn in range(last + 1):
            for world in worlds:
                wrong = turn == last and world is worlds[0]
                far.wrong = byte if wrong else None
                broadcast = world.bound.broadcast_tokens(state=world.state, group=form.group, stream=world.stream)
                step = advance(world, form, turn)
                assert_no_error(lambda: outputs.save(world, step), "save_output")  # noqa: B023
                if wrong:
                    bad = outputs.saved.pop()[0], broadcast
            if form.taken == AT_ONCE and turn < last:
                far.end()
        far.end()
        check_bad(worlds[0], *bad, outputs.sink, f"a step whose header has a wrong byte {byte}")
        good = [ticket for ticket, _ in outputs.saved]
        assert [one for one in outputs.sink.pending if one not in good] == [], "other outputs were sent"
        outputs.compare()
        sent = [record.step for record in outputs.sink.resolve_all()]
        should = [ticket.step for ticket in good] if form.group.is_first else []
        assert sent == should, f"the sink was given the steps {sent}, but should be given {should}"
        error = assert_raises(StateUnusable, lambda: advance(worlds[0], form, last + 1), "a later step of that state")
        assert_says(error, device=kit.bound.name, hook="update_inputs")


def check_bad(world: World, ticket: OutputTicket, broadcast: Ticket, sink: KeepingSink, what: str) -> None:
    """Assert that neither the worker nor the sink gets the record of that step."""
    __tracebackhide__ = True
    error = assert_raises(StateUnusable, lambda: world.state.take(ticket), f"taking the output of {what}")
    assert_says(error, device=world.bound.name, hook="broadcast_tokens")
    for pending in [one for one in sink.pending if one is ticket]:
        sink.pending.remove(pending)
        assert complete_with(pending) is None, f"the sink was given the record of {what}"
        assert_raises(StateUnusable, lambda: ticket.wait(PATIENCE), f"waiting for the output of {what}")
    assert_raises(StateUnusable, lambda: broadcast.wait(PATIENCE), f"waiting for the broadcast of {what}")
