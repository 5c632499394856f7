"""Threads (G26), and devices that are dropped."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic, sleep
from typing import Any

import pytest
from hal_core.group import ALONE

from .fixtures import hook_calls
from .fixtures.world import World
from .harness import backdoor
from .harness.asserts import assert_no_error
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .harness.natives import counted
from .kit import Kit, held_stream

Call = Callable[[World], Any]


def drafts(fixture: World) -> Any:  # noqa: ANN401 (a ticket)
    """Run a step, and hand over drafts of its slots."""
    fixture.advance(range(hook_calls.ENTERED))
    return fixture.propose({0: [4]})


def taken(fixture: World) -> None:
    """Save a step's output, and take its record."""
    fixture.output(fixture.step(range(hook_calls.ENTERED)))


CALLS: Mapping[str, Call] = {
    **hook_calls.CALLS,
    "set_drafts": drafts,
    "take": taken,
    "a state": lambda fixture: hook_calls.working(fixture.kit, name="another"),
    "admit": lambda fixture: hook_calls.entering(fixture, hook_calls.ENTERED),
    "memory": lambda fixture: fixture.device.allocate(1 << 16),
    "a stream": lambda fixture: fixture.device.stream().synchronize(PATIENCE),
    "an event": lambda fixture: fixture.device.event(fixture.stream).wait(PATIENCE),
    "open_group": lambda fixture: fixture.bound.open_group(state=fixture.state, group=ALONE),
    "release": lambda fixture: fixture.release([0]),
    "counters": lambda fixture: fixture.bound.counters(),
}
"""Every public call of an opened device and of a state."""


def on_another_thread(call: Callable[[], Any], what: str) -> Any:  # noqa: ANN401 (what the call returns)
    """Make a call on a new thread, and return its result; an error becomes a failed assertion."""
    __tracebackhide__ = True
    met: list[BaseException] = []
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001 (judged below)
            met.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    assert not thread.is_alive(), f"{what} on another thread than the opener's has not returned"
    if met:
        raise AssertionError(f"{what} on another thread than the opener's raised {met[0]!r}") from met[0]
    return result[0]


@guarantee(26, also=(1, 9, 19))
@pytest.mark.parametrize("what", CALLS)
def test_g26_every_call_works_on_another_thread_than_the_openers(kit: Kit, what: str) -> None:
    fixture = hook_calls.working(kit)
    ticket = on_another_thread(lambda: CALLS[what](fixture), what)
    if hasattr(ticket, "wait"):
        on_another_thread(lambda: ticket.wait(PATIENCE), f"the wait for {what}")
    if what != "release":
        fixture.check(f"{what} on another thread than the opener's")
    arrive(hook_calls.array(fixture), "a call on the opener's thread")


@guarantee(26)
def test_g26_a_device_may_be_used_and_closed_on_another_thread(kit: Kit) -> None:
    one = Kit(kit.subject, kit.effort)
    bound = one.bound

    def use() -> None:
        fixture = hook_calls.working(one)
        for act in (
            hook_calls.scalar,
            hook_calls.strided,
            hook_calls.insert,
            hook_calls.update_inputs,
            hook_calls.copy_out,
        ):
            arrive(act(fixture))
        fixture.check("calls on one thread that is not the opener's")

    on_another_thread(use, "every call of a device")
    on_another_thread(bound.close, "close()")


BEFORE_A_DROP = ("an array", "strided", "update_inputs", "save_output", "submit", "copy_out")
COUNTED = ("allocate", "allocate_host", "stream_create")
UNDER_WAY = ("an array", "strided", "submit", "copy_out")
"""Calls that return without a wait; ``update_inputs`` may wait. The ticket of ``save_output`` would hold its device."""
HOLDING = ("can_hold_stream", "async_h2d", "async_d2h")


def tickets(fixture: World) -> Any:  # noqa: ANN401 (of any kind)
    """Keep the tickets of calls."""
    return [hook_calls.CALLS[what](fixture) for what in BEFORE_A_DROP]


def arrays(fixture: World) -> Any:  # noqa: ANN401 (of any kind)
    """Keep the arrays of a copy out, without its ticket."""
    copied: Any = hook_calls.copy_out(fixture)
    arrive(copied)
    return [*copied.data]


KEPT: Mapping[str, Callable[[World], Any]] = {
    "nothing": lambda _: None,
    "tickets": tickets,
    "arrays": arrays,
    "the state": lambda fixture: fixture.state,
}
"""The objects that the caller of a dropped device keeps."""


class Used:
    """A device that has worked. ``held`` counts the objects that its primitives gave; ``gone`` refers to it weakly."""

    def __init__(self, kit: Kit, keep: Callable[[World], Any]) -> None:
        one = Kit(kit.subject, kit.effort)
        self.gone: weakref.ref[Any] = weakref.ref(one.device)
        self.held: Any = counted(one.device) if hasattr(one.device, "primitives") else {}
        fixture = hook_calls.working(one)
        for what in BEFORE_A_DROP:
            arrive(hook_calls.CALLS[what](fixture))
        self.kit, self.fixture, self.kept = one, fixture, keep(fixture)

    def drop(self) -> None:
        """Drop the device, and all of it that is not kept."""
        del self.kit, self.fixture
        gc.collect()


def settled(kit: Kit, met: Callable[[], bool]) -> bool:
    """Return whether a condition is met in time. A device that is opened gives dropped ones the occasion to release."""
    end = monotonic() + kit.effort.hang
    while True:
        gc.collect()
        kit.open().close()
        if met() or monotonic() > end:
            return met()
        sleep(0.005)


@guarantee(26)
@pytest.mark.parametrize("what", KEPT)
def test_g26_a_dropped_device_releases_what_a_close_releases(kit: Kit, what: str) -> None:
    closed, dropped = Used(kit, KEPT[what]), Used(kit, KEPT[what])
    assert_no_error(closed.kit.bound.close, "closing a device")
    closed.drop()
    dropped.drop()
    if what == "the state":
        assert dropped.gone() is not None, "a device was released, but one of its states is held"
        state = dropped.kept
        got = backdoor.read(state.device, state.memory, state.device.default_stream)
        assert got.any(), "the memory of a state that is held has been cleared"
        del state
    for one in (closed, dropped):
        let_go(one, what)
    check(kit, dropped, closed, what)


def let_go(one: Used, what: str) -> None:
    """Wait for the kept tickets, then drop the kept objects. A function of its own, as its local names end with it."""
    __tracebackhide__ = True
    for ticket in one.kept if what == "tickets" else ():
        arrive(ticket, "a ticket of a device that is gone")
    one.kept = None


def check(kit: Kit, dropped: Used, closed: Used, kept: str) -> None:
    """Assert that a dropped device is released as a closed one is."""
    __tracebackhide__ = True

    def left() -> dict[str, int]:
        """Return memory and streams; an event lives as long as the ticket that has it."""
        both = {name: (dropped.held.get(name, 0), closed.held.get(name, 0)) for name in COUNTED}
        return {name: mine - other for name, (mine, other) in both.items() if mine > other}

    settled(kit, lambda: dropped.gone() is None and not left())
    assert dropped.gone() is None, f"a device that was dropped, with {kept} kept, still exists"
    assert not left(), f"a device that was dropped, with {kept} kept, has {left()} more than one that was closed"


@guarantee(26, requires=HOLDING)
@pytest.mark.parametrize("what", ["nothing", "tickets"])
def test_g26_a_device_dropped_with_work_under_way_is_released_after_it(kit: Kit, what: str) -> None:
    """Its work waits for another device's stream, as a latch of its own would hold it."""
    closed, dropped, later = (Used(kit, KEPT["nothing"]) for _ in range(3))
    assert_no_error(closed.kit.bound.close, "closing a device")
    closed.drop()
    latch = Kit(kit.subject, kit.effort)
    if hasattr(latch.device, "primitives"):
        counted(latch.device)  # events are waited for by devices of one class of primitives
    theirs = latch.device.stream()
    with ExitStack() as held:
        held.enter_context(held_stream(latch.device, theirs, kit.effort.hang))
        dropped.fixture.stream.wait(latch.device.event(theirs))
        under_way = [hook_calls.CALLS[call](dropped.fixture) for call in UNDER_WAY]
        dropped.kept = under_way if what == "tickets" else None
        del under_way
        before = dict(dropped.held)
        dropped.drop()
        later.drop()  # an occasion to release, as opening is, which may wait for every stream
        now = {name: dropped.held[name] for name in COUNTED[:2] if name in before}
        less = {name: count for name, count in now.items() if count < before[name]}
        assert not less, f"memory was released while work of its dropped device is under way: {less}, of {before}"
    let_go(dropped, what)
    check(kit, dropped, closed, what)
