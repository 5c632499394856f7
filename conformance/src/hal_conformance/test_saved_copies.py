"""Copies of outputs: each belongs to its own step, regardless of later work, on the given stream (G13, G18, G19,
G22, G23)."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from hal_core.errors import TicketTimeout
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.slots.step import Step
from hal_core.slots.tasks import TaskKind

from .fixtures.fake_group import PAIR, can_fake_group, fake_source
from .fixtures.hook_cases import HOOK_CASES, SIZES, filled, new_tasks, overlaps
from .fixtures.prepared_calls import assert_copied
from .fixtures.sizes import sizes
from .fixtures.stream_cases import copied, pairs
from .fixtures.world import Outputs, World, assert_rows
from .harness import backdoor
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive, drain
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .harness.waiters import SHORT
from .kit import Kit
from .test_copies import stream_cases

LATER = 4
"""Outputs that come and go after the one that was taken."""


def stepped(kit: Kit) -> tuple[World, Step]:
    """Return a state whose step has run on the default stream, and has reported log-probabilities."""
    fixture, _ = filled(kit)
    step = fixture.step([3, 1, 5, 0, 2, 4], logprobs=1)
    fixture.poke(sampled(0))
    fixture.run(step)
    return fixture, step


def sampled(at: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return a sampler's output fields, different each time."""
    n, width = SIZES.num_slots, SIZES.max_logprobs + 1
    ids = np.arange(n * SIZES.max_accept * width, dtype=np.int64).reshape(n, -1) + 1000 * at
    return {
        "sampled_token_ids": ids[:, 0].copy(),
        "topk_token_ids": ids,
        "topk_logprobs": -(ids % 977).astype(np.float32) / 8,
        "topk_ranks": np.arange(n * SIZES.max_accept, dtype=np.int32) + at,
    }


def save_many(fixture: World, step: Step) -> Outputs:
    """Save outputs with different tokens, and read none of them."""
    outputs = Outputs()
    for at in range(max(sizes(fixture.kit, "outputs under way"))):
        fixture.poke(sampled(at))
        outputs.save(fixture, step)
    return outputs


@guarantee(22, also=(19, 23))
@pytest.mark.parametrize("held", [True, False], ids=["held", "free"])
def test_g22_many_outputs_that_wait_are_each_of_their_own_step(kit: Kit, held: bool) -> None:
    """However many are in flight, the host does not wait; each belongs to its own step."""
    if held and kit.can_hold and not (kit.capabilities.async_d2h and kit.capabilities.async_h2d):
        return
    for what, stream in stream_cases(kit):
        fixture, step = stepped(kit)
        fixture.stream, before = stream, fixture.bound.counters()
        with kit.held(stream, f"save_output on {what}, with many in flight,") if held else nullcontext():
            outputs = save_many(fixture, step)
            if held and kit.can_hold:
                waits = (fixture.bound.counters() - before).host_waits
                done = [ticket.done() for ticket, _ in outputs.saved]
                assert not waits, f"{len(done)} outputs on {what}: the host waited {waits} times for the device"
                assert not any(done), f"{sum(done)} of {len(done)} outputs on {what} are done while it is held"
        marks: list[tuple[np.ndarray[Any, Any], bytes]] = []
        for ticket, _ in outputs.saved[::7]:  # the worker takes some before the sink does
            fixture.take(ticket, f"taking an output on {what}")
            marks += [(array, array.tobytes()) for array in fixture.state.mirror.values()]
        records, rows = outputs.deliver(what), [rows for _, rows in outputs.saved]
        del ticket
        outputs.saved.clear()
        gc.collect()
        save_many(fixture, step).deliver(what)
        for record, should in zip(records, rows, strict=True):
            assert_rows(record, should)
        for array, was in marks:
            assert array.tobytes() == was, f"{what}: a mirror that was kept has changed to {array.tolist()}"


@guarantee(12, also=(22,))
@pytest.mark.parametrize("which", [0, -1], ids=["own", "default"])
def test_g12_the_mirror_stays_that_of_the_step_taken_last(kit: Kit, which: int) -> None:
    """Later outputs are saved, arrive, are sent and are dropped; the mirror changes when one of them is taken."""
    what, stream = stream_cases(kit)[which]
    fixture, step = stepped(kit)
    fixture.stream = stream
    for turn in range(3):
        fixture.poke(sampled(100 * turn))
        should = fixture.mirrored()
        sink = KeepingSink()
        ticket = fixture.save(step, sink)
        fixture.take(ticket, f"taking an output on {what}")
        sink.resolve_all()
        for later_one in range(LATER):
            fixture.poke(sampled(100 * turn + 1 + later_one))
            sink = KeepingSink()  # the only holder of the output before, and of its ticket
            ticket = fixture.save(step, sink)
            assert_no_error(partial(ticket.record, PATIENCE), f"reading a later output on {what}")
            sink.resolve_all()
        fixture.check_mirror(should, f"take {turn} and {LATER} later outputs that were not taken, {what}")


MODES: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "log-probabilities": {"logprobs": 1},
    "drafts": {"speculative": True},
}
"""Mode of decoding to a step's arguments."""


@guarantee(23, requires=("async_d2h", "async_h2d", "can_hold_stream", "primitives"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [0, -1], ids=["own", "default"])
def test_g23_the_compute_stream_does_not_wait_for_the_copy(kit: Kit, mode: str, which: int) -> None:
    """The stream of the copies is held, thrice: work of the step's stream on other memory is done meanwhile."""
    what, stream = stream_cases(kit)[which]
    device: Any = kit.device
    fixture, _ = filled(kit)
    other, memory = World(kit, SIZES, name="other"), device.allocate(64)
    fixture.stream = other.stream = stream
    view, what = View.contiguous(memory, 0, (8,), dtype_of("int64")), f"{mode}, on {what}"
    for turn in range(3):
        if mode != "drafts":
            fixture.poke(sampled(turn))
        step = fixture.advance([3, 1, 5, 0, 2, 4], **MODES[mode])
        outputs = Outputs()
        with kit.held(device.own_stream(stream).copy_stream, f"an output ({what}) or work after it"):
            outputs.save(fixture, step)
            event = device.event(stream)
            assert event.wait(kit.effort.hang / 2), f"output {turn} ({what}): the compute stream waits for its copy"
            arrive(kit.bound.async_set_value(target=view, value=turn, stream=stream))
            if not turn:
                other.enter(new_tasks(other, [0, 3]))
            drain(stream)
        outputs.deliver(what)


@guarantee(23, requires=("async_d2h", "async_h2d", "can_hold_stream"), also=(1, 22))
@pytest.mark.parametrize("at", range(3), ids=["from-default", "to-default", "two-others"])
def test_g23_a_write_comes_after_each_output_on_one_pair_of_streams(kit: Kit, at: int) -> None:
    """Outputs of each mode in turn on a held stream, and writes over them on another, which has waited before."""
    what, saver, writer = pairs(kit)[at]
    fixture, _ = filled(kit)
    for turn, mode in enumerate((*MODES, "plain")):
        why = f"output {turn} ({mode}), {what}"
        fixture.stream = saver
        fixture.poke(sampled(turn))
        step = fixture.advance([3, 1, 5, 0, 2, 4], **MODES[mode])
        outputs = Outputs()
        with kit.held(saver, why):
            outputs.save(fixture, step)
            fixture.stream = writer
            overwritten = fixture.poke(sampled(50 + turn))
            assert_raises(TicketTimeout, partial(overwritten.wait, SHORT), f"a write behind {why}: its ticket")
        arrive(overwritten)
        outputs.deliver(why)


@guarantee(19, also=(22,))
def test_g19_outputs_that_wait_are_of_the_requests_that_held_the_slots(kit: Kit) -> None:
    """Every slot has another request when the record of a step is built; each token is its own request's."""
    fixture, _ = filled(kit)
    outputs = Outputs()
    first: Step | None = None
    for turn in range(6):
        fixture.poke(sampled(turn))
        step = fixture.step([3, 1, 5, 0, 2, 4], logprobs=1)
        first = first or step
        if turn % 2:
            step = first.again(step.number)  # the same orders, of slots that hold other requests now
        fixture.run(step)
        outputs.save(fixture, step)
        residents = sorted(fixture.model.residents)
        gone = fixture.leaving([slot for slot in residents if slot % 2], TaskKind.ABORTED)
        gone += fixture.leaving([slot for slot in residents if slot % 2 == 0])
        kept = range(turn % 3)  # slots that stay free
        fixture.enter([*gone, *new_tasks(fixture, [slot for slot in range(SIZES.num_slots) if slot not in kept])])
    for ticket, rows in outputs.saved[::2]:
        assert_rows(fixture.take(ticket, "taking an output after its requests had left"), rows)
    outputs.deliver("outputs that were sent after their requests had left")


def later(fixture: World, step: Step, hook: str) -> None:
    """Make a call that writes to the fields just saved."""
    if hook == "async_set_value":
        for name in ("sampled_token_ids", "step_idx", "accept_num", "stop_flags", "draft_num"):
            fixture.bound.async_set_value(target=fixture.state.view(name), value=1, stream=fixture.stream)
    elif hook == "insert_tasks":
        gone = fixture.leaving(fixture.model.residents, TaskKind.ABORTED)
        fixture.insert([*gone, *new_tasks(fixture, range(SIZES.num_slots))])
    elif hook == "update_inputs":
        fixture.update_inputs(fixture.step(step.orders[fixture.name].tolist(), logprobs=1))
    elif hook == "broadcast_tokens":
        with fake_source(fixture):
            fixture.bound.broadcast_tokens(state=fixture.state, group=PAIR, stream=fixture.stream)
    elif hook == "save_output":
        fixture.save(step, KeepingSink())
        overwrite(fixture)
    else:
        overwrite(fixture)


def overwrite(fixture: World) -> None:
    """Overwrite every byte of the state."""
    data = noise(7, fixture.model.block.nbytes)
    backdoor.put(fixture.device, fixture.state.memory, [(0, data.tobytes())], fixture.stream)


def check_later(kit: Kit, hook: str) -> None:
    """Make a later call that writes to the same memory; the copy may run arbitrarily late."""
    __tracebackhide__ = True
    if hook == "broadcast_tokens" and not can_fake_group(kit):
        return
    for what, stream in stream_cases(kit):
        fixture, step = stepped(kit)
        if hook == "broadcast_tokens":
            with fake_source(fixture):
                fixture.bound.open_group(state=fixture.state, group=PAIR)
        fixture.stream, outputs = stream, Outputs()
        before = fixture.model.block.copy()
        holding = overlaps(kit, hook) and kit.capabilities.async_d2h
        with kit.held(stream, f"save_output and then {hook} on {what}") if holding else nullcontext():
            outputs.save(fixture, step)
            copy = copied(kit, fixture.state.memory, stream)
            later(fixture, step, hook)
        what = f"{hook} on {what}"
        assert_no_error(partial(outputs.saved[0][0].record, PATIENCE), f"reading the output saved before {what}")
        outputs.deliver(f"the output saved before {what}")
        assert_copied(copy, before, f"the copy made before {what}")


@guarantee(22, also=(23,))
@pytest.mark.parametrize("hook", HOOK_CASES)
def test_g22_no_later_call_changes_what_was_copied(kit: Kit, hook: str) -> None:
    """Nor what was saved."""
    check_later(kit, hook)
