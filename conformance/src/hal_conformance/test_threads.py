"""Calls from other threads than the one that opened the device, one after the other (G26)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hal_core.group import ALONE

from .fixtures import hook_calls
from .fixtures.world import World
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .kit import Kit

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
