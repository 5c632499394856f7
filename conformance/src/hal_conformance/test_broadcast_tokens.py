"""``broadcast_tokens`` in one process (G14, G15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from hal_core.contract.counters import Counters
from hal_core.errors import StateUnusable
from hal_core.group import Group
from hal_core.slots.fields import StateConfig
from hal_core.slots.layout import lay_out
from hypothesis import strategies as st

from .draw.requests import sizes
from .fixtures.batches import ENTER, draw_batch
from .fixtures.stepping import draw_sampling, draw_step
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples


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
    fixture = World(kit, draw(sizes(), "sizes"))
    fixture.enter(draw_batch(draw, fixture, ENTER, least=1))
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
