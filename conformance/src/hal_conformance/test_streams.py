"""Work, events and copies belong to the stream that was given (G1, G3, G4), for every hook and on any stream."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hal_core.errors import TicketTimeout
from hal_core.slots.tasks import Task, TaskKind

from .fixtures.hook_cases import HOOK_CASES, SIZES, hook_cases, new_tasks, overlaps
from .fixtures.prepared_calls import SHAPE, VALUES, Value, assert_alike, assert_copied
from .fixtures.sizes import sizes
from .fixtures.stream_cases import FREE, HELD, Between, Busy, concurrent, copied, pairs
from .fixtures.world import Outputs, World
from .harness import backdoor
from .harness.asserts import assert_raises
from .harness.backdoor import PATIENCE, arrive, drain
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.waiters import AT_ONCE, SHORT, all_wait, come_true
from .kit import Kit
from .oracle.slots import difference

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket

HOOKS = pytest.mark.parametrize("hook", HOOK_CASES)
MANY = 64
"""Events made after a waited-for one, so that one reused too early is noticed."""


def run_concurrent(kit: Kit, hook: str, stream_case: str) -> None:
    """Run each form of a hook on a stream, among other work of that stream."""
    __tracebackhide__ = True
    if stream_case in HELD and kit.can_hold and not overlaps(kit, hook):
        return  # such a call waits for its stream, as its capabilities declare
    for what, make in hook_cases(kit, hook):
        call = make(kit)
        what = f"{what} on {stream_case}"
        with concurrent(kit, stream_case, what) as (stream, aside):
            found = Between(kit, call, stream, aside)
            if stream_case in HELD and kit.can_hold:
                assert_pending(kit, found, hook, what)
            else:
                found.check(what)
        if stream_case in HELD:
            found.check(what)


def assert_pending(kit: Kit, found: Between, hook: str, what: str) -> None:
    """Assert that while its stream is held, neither the call nor a copy is done."""
    __tracebackhide__ = True
    assert not found.ticket.done(), f"{what}: its ticket is done while the stream is held"
    assert found.ticket.mode == "async", f"{what}: its ticket says {found.ticket.mode!r}, but its work is not done"
    if kit.capabilities.async_d2h:
        early = [copy.done() for copy in found.copies]
        assert not any(early), f"{what}: copies before it, after it and behind it say done={early} on a held stream"


@guarantee(1, also=(2, 3, 4, 5, 7, 12, 13, 18, 23))
@HOOKS
def test_g01_a_call_belongs_to_the_stream_that_was_given(kit: Kit, hook: str) -> None:
    """On every kind of stream, with others held and with that one held, on which no call may wait."""
    for stream_case in (*FREE, *HELD):
        run_concurrent(kit, hook, stream_case)


@guarantee(3, requires=("async_h2d", "can_hold_stream"))
def test_g03_what_a_held_stream_will_read_is_not_written_over(kit: Kit) -> None:
    """So many bytes that staging memory would be reused, if events of another stream guarded its uses."""
    device, own = kit.device, kit.device.stream()
    form = Value((slice(None),), "array", shape=(1 << 13,))
    made = [form.call(kit, seed=seed) for seed in range(40)]
    with kit.held(own):
        tickets = []
        for at, call in enumerate(made):
            tickets.append(call.act(own))
            arrive(backdoor.put(device, device.allocate(64), [(0, bytes(64))], device.default_stream))
            assert not tickets[at].done(), f"write {at} of 64 KiB is done, but its stream is held"
    for at, (call, ticket) in enumerate(zip(made, tickets, strict=True)):
        arrive(ticket)
        wrong = call.wrong(backdoor.read(device, call.memory, own)[: call.before.nbytes])
        assert not wrong, f"write {at} of 40 x 64 KiB on a held stream: {wrong}"


def orders(names: Sequence[str], profile: str) -> list[tuple[str, str]]:
    """Return every pair in both orders; in the profile quick each item with three other ones, before some and after
    some."""
    if profile != "quick":
        return [*permutations(names, 2)]
    steps = (1, 2, len(names) // 2)
    return [(one, names[(at + step) % len(names)]) for at, one in enumerate(names) for step in steps]


PAIRS_HELD = 200
"""Pairs of writes behind one held stream, which a device must not take to be a call that waits."""


@guarantee(4)
@pytest.mark.parametrize("stream_case", [*HELD, *FREE])
def test_g04_of_any_two_writes_on_one_stream_the_later_wins(kit: Kit, stream_case: str) -> None:
    """Every form after every other, to overlapping targets, without waits."""
    if stream_case in HELD and kit.can_hold and not overlaps(kit, "async_set_value"):
        return
    forms = {what: form for what, form in VALUES.items() if form.shape == SHAPE and form.dtype == "int64"}
    memory = kit.device.allocate(8 * int(np.prod(SHAPE)))
    seen: list[tuple[str, CopyTicket, backdoor.Bytes]] = []

    def compare() -> None:
        __tracebackhide__ = True
        for what, copy, should in seen:
            assert_copied(copy, should, f"{what}, on {stream_case}")

    pairs = [*enumerate(orders([*forms], kit.effort.profile))]
    for begin in range(0, len(pairs), PAIRS_HELD):
        seen.clear()
        with concurrent(kit, stream_case, f"async_set_value on {stream_case}") as (stream, _):
            now = noise(begin, memory.nbytes)
            backdoor.put(kit.device, memory, [(0, now.tobytes())], stream)
            for seed, (one, other) in pairs[begin : begin + PAIRS_HELD]:
                for what in (one, other):
                    call = forms[what].call(kit, memory, now, 2 * seed + (what == other))
                    for source, data in call.sources:
                        backdoor.put(kit.device, source, [(0, data.tobytes())], stream)
                    call.act(stream)
                    assert call.after is not None
                    now = call.after
                seen.append((f"{one}, then {other}", copied(kit, memory, stream), now))
            if stream_case in FREE:
                compare()
        compare()


@guarantee(4)
@pytest.mark.parametrize("stream_case", [*HELD, *FREE])
def test_g04_hooks_on_one_state_take_effect_in_the_order_of_their_calls(kit: Kit, stream_case: str) -> None:
    """Requests enter, a field is set, a step runs, its output is saved, some leave: on one stream, without waits."""
    if stream_case in HELD and kit.can_hold and not overlaps(kit, "update_inputs"):
        return
    fixture, outputs = World(kit, SIZES), Outputs()
    with concurrent(kit, stream_case, f"one of the hooks on {stream_case}") as (stream, _):
        fixture.stream = stream
        tasks = new_tasks(fixture, range(6))
        fixture.insert(tasks)
        for number in range(3):
            sampled = 1000 * number + np.arange(SIZES.num_slots, dtype=np.int64)
            view = fixture.state.view("sampled_token_ids")
            kit.bound.async_set_value(target=view, value=sampled.reshape(view.shape), stream=stream)
            fixture.model.cells["sampled_token_ids"][...] = sampled[:, None]
            step = fixture.step([5, 3, 0, 4, 2, 1])
            fixture.update_inputs(step)
            outputs.save(fixture, step)
            gone = [Task(TaskKind.PREEMPTED, number, tasks[number].request), *new_tasks(fixture, [number])]
            fixture.insert(gone)
        state = copied(kit, fixture.state.memory, stream)
        if stream_case in FREE:
            compare_state(fixture, state, outputs, stream_case)
    if stream_case in HELD:
        compare_state(fixture, state, outputs, stream_case)


def compare_state(fixture: World, state: CopyTicket, outputs: Outputs, stream_case: str) -> None:
    """Compare every record and every byte."""
    __tracebackhide__ = True
    outputs.deliver(stream_case)
    arrive(state)
    wrong = difference(fixture.model, state.data[0])
    assert not wrong, f"after three steps on {stream_case}: {wrong}"


@guarantee(4, requires=("async_h2d", "can_hold_stream"), also=(1, 12, 28))
def test_g04_every_call_waits_for_the_writes_before_it(kit: Kit) -> None:
    """No copy is pending, for which a write on a stream of its own would wait as well."""
    device, stream = kit.device, kit.device.stream()
    hooks = [hook for hook in HOOK_CASES if hook != "save_output" and overlaps(kit, hook)]
    made = {what: make(kit) for hook in hooks for what, make in hook_cases(kit, hook)}
    with kit.held(stream, "one of the hooks behind writes"):
        tickets = {}
        for what, call in made.items():
            for memory, data in ((call.memory, ~call.before), (call.memory, call.before), *call.sources):
                backdoor.put(device, memory, [(0, data.tobytes())], stream)
            tickets[what] = call.act(stream)
        all_wait(tickets, "writes before them on their stream, which are held")
    for what, call in made.items():
        call.complete(tickets[what])
        wrong = call.wrong(backdoor.read(device, call.memory, stream)[: call.before.nbytes])
        assert not wrong, f"{what} behind writes on its stream: {wrong}"


# -- bare streams and events -----------------------------------------------------------------------------------------


@guarantee(1, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(2, 26))
def test_g01_the_work_of_a_stream_that_is_dropped_is_executed(kit: Kit) -> None:
    device, memory, should = kit.device, kit.device.allocate(4096), noise(3, 4096)
    held, dropped = device.stream(), device.stream()
    with kit.held(held, "the work of a stream that was dropped"):
        dropped.wait(device.event(held))
        write = backdoor.put(device, memory, [(0, should.tobytes())], dropped)
        copy = copied(kit, memory, dropped)
        del dropped
        gc.collect()
        device.allocate(1)  # a device looks for free memory when it allocates
        assert not write.done(), "a write is done, though its stream waits for a held one"
    come_true({"a write on a dropped stream": write, "a copy on a dropped stream": copy}, kit.effort.hang)
    assert_alike(copy.data[0][:4096], should, "a copy on a stream that was dropped")


@guarantee(1, requires="can_hold_stream")
def test_g01_an_event_waits_for_its_own_stream_alone(kit: Kit) -> None:
    chosen = pairs(kit)
    last = chosen[-1][-1]
    for what, held, free in chosen:
        earlier = kit.device.event(held)
        assert earlier.wait(PATIENCE), f"{what}: an event of an idle stream has not passed after {PATIENCE} s"
        with kit.held(held):
            behind = Busy(kit, held, 1)
            for how in (kit.device.event, type(held).record):
                late, other = how(held), how(free)
                many = [how(free) for _ in range(max(sizes(kit, "events at once")) if free is last else 0)]
                assert other.wait(PATIENCE), f"{what}: an event of the free stream waits for the held one"
                assert other.done(), f"{what}: an event was waited for, but is not done"
                for timeout in (AT_ONCE, SHORT):
                    assert not late.wait(timeout), f"{what}: wait({timeout}) for an event of the held stream is true"
                assert not late.done(), f"{what}: an event of the held stream is done"
            assert earlier.done(), f"{what}: an event that had passed has not any more"
            drain(free)
            assert not late.done(), f"{what}: an event of the held stream is done, and {len(many)} were made after it"
            assert_raises(TicketTimeout, lambda: held.synchronize(SHORT), f"{what}: synchronize of the held stream")  # noqa: B023
        assert late.wait(PATIENCE), f"{what}: an event has not passed, though its stream continued"
        drain(held)
        assert late.done(), f"{what}: an event is not done, though its stream is empty"
        behind.check()


@guarantee(1)
def test_g01_a_stream_waits_for_the_events_that_it_was_given(kit: Kit) -> None:
    """Each single event, even if it is unreferenced and many are made after it; but not other work before it."""
    device = kit.device
    for what, first, second in pairs(kit):
        other = device.stream()
        source, result = device.allocate(4096), device.allocate(4096)
        before, after = noise(1, 4096), noise(2, 4096)
        for stream, memory in ((first, source), (second, result)):
            arrive(backdoor.put(device, memory, [(0, before.tobytes())], stream))
        with kit.held(first):
            backdoor.put(device, source, [(0, after.tobytes())], first)
            early = copied(kit, result, second)
            second.wait(device.event(first))
            gc.collect()
            for _ in range(MANY):
                assert device.event(other).wait(PATIENCE), f"{what}: an event of an idle stream has not passed"
            seen, mine = copied(kit, source, second), copied(kit, result, second)
            arrive(early)  # it was there before the stream waited
            if kit.can_hold and kit.capabilities.async_d2h:
                assert not seen.done(), f"{what}: a copy on a stream that waits for a held one is done"
                assert not mine.done(), f"{what}: work on a stream that waits for a held one is done"
        for copy, should, which in ((early, before, "early"), (seen, after, "late"), (mine, before, "late")):
            assert_copied(copy, should, f"{what}: a copy on the second, made {which}")


@guarantee(1, requires=("can_hold_stream", "async_d2h"))
def test_g01_a_stream_waiting_for_two_waits_for_both_and_no_later_work(kit: Kit) -> None:
    device = kit.device
    memory = device.allocate(4096)
    backdoor.write(device, memory, 0, noise(1, 4096), device.default_stream)
    for order in (0, 1):
        held, middle, last = [device.stream(), device.stream()], device.stream(), device.stream()
        latches = [kit.held(stream) for stream in held]
        with latches[0], latches[1]:
            busy = [Busy(kit, stream, at) for at, stream in enumerate(held)]
            for stream in held:
                middle.wait(device.event(stream))
            last.wait(device.event(middle))
            copy = copied(kit, memory, last)
            latches[order].release()
            drain(held[order])
            with kit.held(held[order]):  # work after the event does not matter to streams that wait for it
                behind = Busy(kit, held[order], 5)
                assert_raises(
                    TicketTimeout,
                    lambda: copy.wait(SHORT),  # noqa: B023
                    f"a copy behind two streams, of which the {'first' if order else 'second'} is still held",
                )
                latches[1 - order].release()
                arrive(copy)
        for each in (*busy, behind):
            each.check()


@guarantee(1, requires="tensors")
def test_g01_a_tensor_is_written_on_the_stream_that_was_given(kit: Kit) -> None:
    support, values = kit.subject.support, np.arange(4000, dtype=np.int64).reshape(40, 100)
    for stream_case in FREE:
        tensor = support.tensor(kit.device, np.zeros_like(values))
        support.values_of(kit.device, tensor)  # created before any stream is held
        with concurrent(kit, stream_case, f"async_set_value of a tensor on {stream_case}") as (stream, _):
            for part in (slice(None), slice(3, 4)):
                arrive(kit.bound.async_set_value(target=tensor[part], value=values[part], stream=stream))  # type: ignore[index]
        got = support.values_of(kit.device, tensor)
        wrong = np.argwhere(got != values)
        assert not len(wrong), (
            f"a tensor written on {stream_case}: element {wrong[0].tolist()} and {len(wrong) - 1} others"
        )
