"""The end of a device: closing with queued work, closing twice, later calls, and a fork (G26)."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack

import pytest
from hal_core.errors import DeviceClosed, HalError
from hal_core.memory.views import ByteRange
from hal_core.output.sinks import MemorySink
from hal_core.tickets import Ticket

from .fixtures import hook_calls
from .fixtures.large_blocks import GAP, LargeBlock
from .fixtures.world import World, assert_rows
from .harness.asserts import assert_no_error, assert_raises
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .kit import Kit, held_stream
from .liars.faults import DelayedCopies, Fault
from .test_device_faults import HOOKS, next_call
from .test_faults import under

A_MOMENT = 0.2
"""Seconds in which a close that waits for work has surely begun; one that does not wait has ended."""


def another(kit: Kit) -> Kit:
    """Open a second device of the same kind."""
    return Kit(kit.subject, kit.effort)


@guarantee(26, also=(19, 23))
def test_g26_closing_one_device_leaves_another_as_it_was(kit: Kit) -> None:
    first, second, third = another(kit), another(kit), another(kit)
    fixtures = [hook_calls.working(one) for one in (first, second, third)]
    sink = KeepingSink()
    arrive(hook_calls.submit(fixtures[1]))
    arrive(hook_calls.update_inputs(fixtures[1]))
    should = fixtures[1].rows_of(fixtures[1].step(range(hook_calls.SIZES.num_slots)))
    hook_calls.save(fixtures[1], sink)
    assert_no_error(first.bound.close, "closing one of three devices")
    assert_no_error(third.bound.close, "closing the youngest of three devices")
    fixtures[1].check("two other devices of the kind were closed")
    (record,) = sink.resolve_all()
    assert_rows(record, should)
    for what, act in hook_calls.CALLS.items():
        hook_calls.make(act, fixtures[1], f"{what}, after other devices were closed")
    fixtures[1].check("it kept working after other devices were closed")
    assert_no_error(lambda: hook_calls.working(second, name="after"), "a new state, when other devices were closed")
    assert_no_error(lambda: hook_calls.working(another(kit)), "another opened device, after other devices were closed")
    assert_no_error(second.bound.close, "closing the last of three devices")


@guarantee(26)
def test_g26_closing_the_device_that_was_opened_first_leaves_the_others(kit: Kit) -> None:
    """The first opened device may own a context that the process has once."""
    first, what = kit.bound, "the device that was opened first was closed"
    younger = another(kit)
    fixture = hook_calls.working(younger)
    assert_no_error(first.close, "closing the device that was opened first")
    kit.renew()
    for call, act in hook_calls.CALLS.items():
        hook_calls.make(act, fixture, f"{call}, after {what}")
    fixture.check(f"it kept working after {what}")
    younger.renew()


@guarantee(26)
@pytest.mark.parametrize("hook", HOOKS)
def test_g26_a_closed_device_refuses_each_call_and_closes_again_silently(kit: Kit, hook: str) -> None:
    one = another(kit)
    fixture = hook_calls.working(one)
    bound, sink = one.bound, fixture.sink
    sent = len(sink.records)
    for _ in range(3):
        assert_no_error(bound.close, "closing a device again")
    for _ in range(2):
        error = assert_raises(DeviceClosed, lambda: next_call(fixture, hook), f"{hook} on a closed device")
        assert error.device == bound.name, f"{error!r} names {error.device!r}, but should name {bound.name!r}"
        assert error.cure, f"{error} names no cure"
        assert_no_error(bound.close, f"closing a device again after {hook} was refused")
    assert_no_error(bound.device.close, "closing the plugin's own object again")
    assert len(sink.records) == sent, f"{hook} on a closed device gave its sink a record"
    assert_raises(HalError, lambda: bound.device.allocate(64), "allocating on a closed device")


@guarantee(19, also=(23, 26))
@pytest.mark.parametrize("fault", [Fault, DelayedCopies], ids=["as it is", "copies come late"])
def test_g19_output_saved_before_closing_is_delivered_after_it(kit: Kit, fault: type[Fault]) -> None:
    """On an asynchronous device its copies are in flight: on a held stream, and after much other work."""
    with under(kit, fault) as (laid, _):
        fixture = hook_calls.working(laid)
        kept, threaded = KeepingSink(), MemorySink(threaded=True)
        should, tickets = [], list[Ticket]()
        with ExitStack() as held:
            if kit.can_hold and kit.capabilities.async_d2h:
                held.enter_context(held_stream(laid.device, fixture.stream, kit.effort.hang))
            for sink in (kept, threaded):
                hook_calls.submit(fixture)
                step = fixture.step(range(hook_calls.SIZES.num_slots))
                should.append(fixture.rows_of(step))
                tickets.append(fixture.save(step, sink))
            tickets.append(hook_calls.array(fixture))
            closing = threading.Thread(target=laid.bound.close)
            closing.start()
            closing.join(A_MOMENT)
        closing.join(PATIENCE)
        assert not closing.is_alive(), "close() with work under way has not returned"
        kept.resolve_all()
        for ticket in tickets:
            arrive(ticket, "work given before closing")
        threaded.close(PATIENCE)
        for name, sink, rows in (("kept", kept, should[0]), ("sent by a thread", threaded, should[1])):
            assert len(sink.records) == 1, f"output that was {name} when the device was closed was lost"
            assert_rows(sink.records[0], rows)


@guarantee(26, requires=("async_h2d", "can_hold_stream"))
def test_g26_closing_waits_for_a_copy_between_two_memories(kit: Kit) -> None:
    """Without the ring and blocks of the host, whose own close waits."""
    one = another(kit)
    block, closing = LargeBlock(one, 3 * GAP), threading.Thread(target=one.bound.close)
    block.stream = one.device.stream()
    with held_stream(one.device, block.stream, kit.effort.hang):
        ticket = block.set(block.at(0, (GAP,)), block.at(GAP, (GAP,)))
        closing.start()
        closing.join(A_MOMENT)
        assert closing.is_alive(), "close() has returned, but a stream that is not the default one has work"
    closing.join(PATIENCE)
    assert not closing.is_alive(), "close() with work under way has not returned"
    arrive(ticket, "work of another stream, given before closing")


CLOSED = ("on the device", "copy_out", "update_inputs", "a stream that was dropped")
"""Work under way."""


@guarantee(26, requires=("async_h2d", "async_d2h", "can_hold_stream"))
@pytest.mark.parametrize("what", CLOSED)
def test_g26_closing_waits_for_the_work_of_every_stream(kit: Kit, what: str) -> None:
    if what == "update_inputs" and kit.missing(("overlapped_update",)):
        pytest.skip("needs overlapped_update")
    one = another(kit)
    fixture, closing = hook_calls.working(one), threading.Thread(target=one.bound.close)
    held = fixture.stream = one.device.stream()
    dropped, free = [one.device.stream()], [one.device.stream() for _ in range(3)]
    with held_stream(one.device, held, kit.effort.hang):
        if what == CLOSED[-1]:
            fixture.stream = dropped.pop()
            fixture.stream.wait(one.device.event(held))
        ticket = hook_calls.CALLS.get(what, hook_calls.on_device)(fixture)
        fixture.stream = held
        for stream in free:  # later work on other streams is done before
            arrive(one.device.copy_out(fixture.state.memory, [ByteRange(0, 8)], stream))
        closing.start()
        closing.join(A_MOMENT)
        assert closing.is_alive(), f"close() has returned, but {what} is under way, not on the default stream"
    closing.join(PATIENCE)
    assert not closing.is_alive(), "close() with work under way has not returned"
    arrive(ticket, f"{what}, given before closing")


@guarantee(26)
def test_g26_a_context_closes_the_device_and_keeps_the_error_under_way(kit: Kit) -> None:
    one = another(kit)
    fixture = hook_calls.working(one)

    def fail() -> None:
        with one.bound:
            hook_calls.array(fixture)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_raises(DeviceClosed, lambda: hook_calls.scalar(fixture), "a call on a device whose context has ended")


def refused_in_child(fixture: World) -> str:
    """In the child of a fork, return "" if each call is refused and closing has no effect, else the violation."""
    wrong = []
    for hook in HOOKS:
        try:
            next_call(fixture, hook)
            wrong.append(f"{hook} went through")
        except DeviceClosed as error:
            if "fork" not in str(error) or error.device != fixture.bound.name or not error.cure:
                wrong.append(f"{hook} said {error}")
        except BaseException as error:  # noqa: BLE001 (the parent judges it)
            wrong.append(f"{hook} raised {error!r}")
    try:
        fixture.bound.close()
    except BaseException as error:  # noqa: BLE001 (the parent judges it)
        wrong.append(f"close raised {error!r}")
    return "; ".join(wrong)


@guarantee(26)
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_g26_after_a_fork_the_child_is_refused_and_the_parent_works_on(kit: Kit) -> None:
    one = another(kit)
    fixture = hook_calls.working(one)
    pending = hook_calls.submit(fixture)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, f"said:{refused_in_child(fixture)}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + PATIENCE
    ended = (0, 0)
    while ended[0] == 0 and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    answer = os.read(reading, 4096).decode()
    os.close(reading)
    assert ended[0], f"the child of a fork still ran after {PATIENCE} s: a call on its copy of the device hung"
    assert answer == "said:", f"in the child of a fork: {answer.removeprefix('said:') or f'it ended with {ended[1]}'}"
    arrive(pending)
    fixture.check("a fork whose child has closed its copy")
    for what, act in hook_calls.CALLS.items():
        hook_calls.make(act, fixture, f"{what} in the parent of a fork")
    fixture.check("it worked on after a fork")
    assert_no_error(one.bound.close, "closing the device of the parent of a fork")
