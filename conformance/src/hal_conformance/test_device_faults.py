"""Failures on the device are raised by the ticket, the next call or closing, and no work is half done (G26)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hal_core.errors import DeviceClosed, HalError, OutOfMemory
from hal_core.group import ALONE

from .fixtures import hook_calls
from .fixtures.hook_calls import HookCall
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import PATIENCE, arrive, drain
from .harness.guarantees import guarantee
from .harness.sinks import KeepingSink
from .kit import Kit
from .liars import faults
from .test_faults import under

TELLS = (1, 3, 8, 16, 18, 19, 23)
"""Guarantees that a device may break by hiding a failure."""


class DriverError(RuntimeError):
    """An error outside the contract, as raised by a library below the plugin."""


def raw(what: str) -> DriverError:
    """Return the error of a library."""
    return DriverError(f"error 719 in {what}")


ERRORS: dict[str, tuple[type[Exception], Callable[[str], Exception]]] = {
    "the contract's error": (faults.CopyFailed, faults.refused),
    "a library's error": (DriverError, raw),
}
LATE = [*hook_calls.WRITES, "update_inputs"]
HOOKS = ("async_set_value", "insert_tasks", "save_output", "broadcast_tokens", "update_inputs", "state", "open_group")


def next_call(fixture: World, hook: str) -> Any:  # noqa: ANN401 (a ticket, or a state)
    """Make one more call, which raises the error of an earlier one."""
    acted: dict[str, HookCall] = {
        "async_set_value": hook_calls.scalar,
        "insert_tasks": hook_calls.insert,
        "save_output": lambda fixture: hook_calls.save(fixture, KeepingSink()),
        "broadcast_tokens": hook_calls.broadcast,
        "update_inputs": hook_calls.update_inputs,
    }
    if hook == "state":
        return fixture.bound.state(hook_calls.SIZES, name="another")
    if hook == "open_group":
        return fixture.bound.open_group(state=fixture.state, group=ALONE)
    return acted[hook](fixture)


def call_failing_late(fixture: World, fuse: faults.Fuse, what: str) -> Any:  # noqa: ANN401 (a ticket)
    """Make a call whose work fails after the call."""
    __tracebackhide__ = True
    met, fuse.at = fuse.met, 1
    ticket = hook_calls.HOOKS[what](fixture)
    assert fuse.met == met + 1, f"{what}: {fuse.met - met} of the device's writes failed, should be 1"
    return ticket


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("what", LATE)
def test_g26_what_fails_late_is_told_by_its_ticket_to_everybody_who_waits(kit: Kit, what: str, error: str) -> None:
    with under(kit, faults.LateWrites) as (laid, fuse):
        kind, type(laid.device).error = ERRORS[error][0], staticmethod(ERRORS[error][1])  # type: ignore[attr-defined]
        fixture = hook_calls.working(laid)
        fuse.ripe.clear()
        ticket = call_failing_late(fixture, fuse, what)
        assert not ticket.done(), f"{what}: the ticket is done before its work has ended"
        fuse.ripe.set()
        met: list[BaseException] = []

        def wait() -> None:
            try:
                ticket.wait(PATIENCE)
            except Exception as raised:  # noqa: BLE001 (it is judged below)
                met.append(raised)

        waiters = [threading.Thread(target=wait) for _ in range(2)]
        for thread in waiters:
            thread.start()
        for thread in waiters:
            thread.join(PATIENCE)
        wait()
        assert [type(one) for one in met] == [kind] * 3, f"{what} failed late; its three waiters got {met}"
        assert ticket.done(), f"{what} failed, and its ticket is not done"
        hook_calls.make(hook_calls.array, fixture, f"a call after the error of {what} was raised")
        fixture.check(f"{what} failed late, and its ticket raised it")
        assert_no_error(laid.bound.close, f"closing, after the error of {what} was raised")


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("hook", HOOKS)
def test_g26_an_unobserved_error_is_raised_by_the_next_call_without_work(kit: Kit, hook: str) -> None:
    with under(kit, faults.LateWrites) as (laid, fuse):
        for what in LATE:
            check_next_call(hook_calls.working(laid), fuse, what, hook)


def check_next_call(fixture: World, fuse: faults.Fuse, what: str, hook: str) -> None:
    """Let ``what`` fail unobserved; ``hook`` must raise the error without effect, and work when it is called again."""
    __tracebackhide__ = True
    fuse.ripe.clear()
    call_failing_late(fixture, fuse, what)
    hook_calls.make(hook_calls.array, fixture, f"a call while {what} is under way")
    fuse.ripe.set()
    before, done = fixture.model.block.copy(), (fixture.state.updates, len(fixture.sink.records))
    leavers = {slot: [*left] for slot, left in fixture.model.leavers.items()}
    error = assert_raises(
        faults.CopyFailed, lambda: next_call(fixture, hook), f"{hook} after {what}, which failed unseen"
    )
    assert error.cure, f"{error} names no cure"
    fixture.model.block[...], fixture.model.leavers = (
        before,
        leavers,
    )  # the model of save_output cleans up at every call
    fixture.check(f"{hook} raised that {what} had failed")
    now = fixture.state.updates, len(fixture.sink.records)
    assert now == done, f"{hook} raised that {what} had failed, but did its work: {now}, before {done}"
    assert_no_error(lambda: next_call(fixture, hook), f"{hook} once more: the error was already raised")


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "under way"])
@pytest.mark.parametrize("what", LATE)
def test_g26_what_nobody_waited_for_is_told_by_closing(kit: Kit, what: str, ended: bool) -> None:
    with under(kit, faults.LateWrites) as (laid, fuse):
        fixture = hook_calls.working(laid)
        call_failing_late(fixture, fuse, what)
        if ended:
            drain(fixture.stream)
        assert_raises(faults.CopyFailed, laid.bound.close, f"closing after {what}, which failed unseen")
        assert_no_error(laid.bound.close, "closing once more")
        assert_raises(
            DeviceClosed, lambda: hook_calls.scalar(fixture), "a call on a device whose closing raised an error"
        )


@guarantee(26, also=TELLS)
def test_g26_of_several_errors_none_is_lost(kit: Kit) -> None:
    with under(kit, faults.LateWrites) as (laid, fuse):
        fixture = hook_calls.working(laid)
        fuse.ripe.clear()
        for what in LATE:
            call_failing_late(fixture, fuse, what)
        first = fuse.met - len(LATE) + 1
        fuse.ripe.set()
        drain(fixture.stream)
        texts = ""
        for _ in LATE:
            try:
                fixture.bound.open_group(state=fixture.state, group=ALONE)
                break
            except HalError as error:
                texts += "\n".join([str(error), *getattr(error, "__notes__", ()), ""])
        missing = [number for number in range(first, fuse.met + 1) if f"number {number}" not in texts]
        assert not missing, (
            f"of {len(LATE)} calls that failed unobserved, {len(missing)} errors were never raised: {texts!r}"
        )


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("late", [False, True], ids=["at-the-call", "late"])
@pytest.mark.parametrize("way", ["ticket", "next call", "closing", "sink"])
def test_g26_a_copy_of_output_that_fails_is_told(kit: Kit, way: str, late: bool) -> None:
    with under(kit, faults.FailingCopies) as (laid, fuse):
        fixture = hook_calls.working(laid)
        arrive(hook_calls.leave(fixture))
        arrive(hook_calls.update_inputs(fixture))
        laid.device.late = late  # type: ignore[attr-defined]  # the fault's
        fuse.at = 1
        sink = KeepingSink()

        def tell() -> None:
            ticket = hook_calls.save(fixture, sink if way == "sink" else fixture.sink)
            if way == "ticket":
                ticket.wait(PATIENCE)
            elif way == "next call":
                hook_calls.array(fixture)
            elif way == "closing":
                fixture.bound.close()
            else:
                sink.pending[0].resolve()

        sent = len(fixture.sink.records)
        assert_raises(faults.CopyFailed, tell, f"output whose copy failed, by its {way}")
        assert fuse.met == 1, f"{fuse.met} copies failed, should be 1"
        given = [*fixture.sink.records[sent:], *sink.records]
        assert not given, f"output was delivered though its copy failed: {given}"
        if way != "closing":
            fixture.check("the output of a step could not be copied")


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("what", hook_calls.WRITES)
def test_g26_a_write_refused_by_the_driver_raises_and_is_not_booked(kit: Kit, what: str) -> None:
    with under(kit, faults.FailingWrites) as (laid, fuse):
        fixture = hook_calls.working(laid)
        before = fixture.model.block.copy()
        booked = fixture.state.host_table.table.copy(), dict(fixture.state.host_table.live)
        fuse.at = 1
        error = assert_raises(
            faults.CopyFailed, lambda: hook_calls.WRITES[what](fixture).wait(PATIENCE), f"{what}, refused"
        )
        hook = "insert_tasks" if what in ("insert", "leave") else "async_set_value"
        assert_says(error, device=laid.bound.name, hook=hook)
        fixture.model.block[...] = before
        fixture.check(f"{what} was refused")
        assert (fixture.state.host_table.table == booked[0]).all(), f"{what} was refused, and booked all the same"
        assert fixture.state.host_table.live == booked[1], f"{what} was refused, and booked all the same"


@guarantee(26, also=TELLS)
@pytest.mark.parametrize("what", hook_calls.CALLS)
@pytest.mark.parametrize("sort", ["the contract's", "Python's own"])
def test_g26_a_call_that_finds_no_memory_says_so_and_does_nothing(kit: Kit, what: str, sort: str) -> None:
    """Most calls need no memory; those that allocate (maps, scratch, staging) must survive a failed allocation."""
    with under(kit, faults.OutOfRoom) as (laid, fuse):
        laid.device.raw = sort != "the contract's"  # type: ignore[attr-defined]  # the fault's
        fixture = hook_calls.working(laid)
        fuse.at = 1
        before = fixture.model.block.copy()
        try:
            hook_calls.CALLS[what](fixture).wait(PATIENCE)
        except MemoryError:
            assert fuse.met, f"{what} ran out of memory, but every allocation was granted"
            fixture.model.block[...] = before
        else:
            assert not fuse.met, f"{what} found no memory, but raised no error"
        fuse.at = 0
        fixture.check(f"{what}, when there was no memory")


def _makes_a_state(laid: Kit, name: str) -> bool:
    """Return whether a state could be created; if not, the error must be the contract's and name who and what."""
    try:
        laid.bound.state(hook_calls.SIZES, name=name)
    except OutOfMemory as error:
        assert_says(error, device=laid.bound.name, hook="state")
        return False
    except Exception as error:
        raise AssertionError(f"a state without memory raised {error!r}, not OutOfMemory") from error
    return True


@guarantee(26, also=(8,))
@pytest.mark.parametrize("sort", ["the contract's", "Python's own"])
def test_g26_a_state_that_finds_no_memory_leaves_nothing_behind(kit: Kit, sort: str) -> None:
    with under(kit, faults.OutOfRoom) as (laid, fuse):
        laid.device.raw = sort != "the contract's"  # type: ignore[attr-defined]  # the fault's
        fixture = hook_calls.working(laid)
        tries = 0
        while fuse.met == tries:
            tries += 1
            assert tries < 100, "a state takes a hundred allocations"
            gc.collect()
            known = len(laid.device.given)  # type: ignore[attr-defined]  # the fault's
            fuse.at = tries
            if _makes_a_state(laid, f"try {tries}"):
                assert fuse.met < tries, f"allocation {tries} found no memory, and a state was made all the same"
                break
            gc.collect()  # outside the handler of the error, whose traceback holds the unfinished state
            left = [one for one in laid.device.given[known:] if one() is not None]  # type: ignore[attr-defined]
            assert not left, f"allocation {tries} of a state failed, and {len(left)} blocks of it are still held"
        assert fuse.met, "no allocation of a state can fail: the device does not ask its own allocate() for memory"
        fuse.at = 0
        fixture.check("another state found no memory")
        assert_no_error(lambda: hook_calls.working(laid, name="after"), "a state, once there is memory again")
