"""Device memory and runtime objects that calls lose a little at a time (G26)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.errors import HalError
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.memory.writes import Writes

from .fixtures import hook_calls
from .harness.asserts import assert_raises
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .harness.lies import Lie, lay_over
from .harness.natives import counted
from .kit import Kit
from .liars import faults
from .test_faults import under

if TYPE_CHECKING:
    from hal_core.memory.views import Memory

    from .fixtures.world import World

INT64 = dtype_of("int64")
ROUNDS, WINDOWS = 40, 8
"""Rounds of a window, and most windows. A loss appears in each window; a pool that fills, as of fences, does not."""
CALLS = (*hook_calls.VALUES, "submit", "copy_out", "onto itself", "insert and leave", "a step")


def _write_several(fixture: World) -> None:
    writes, other = Writes(), View.contiguous(fixture.device.allocate(64), 0, (8,), INT64)
    writes.fill(fixture.state.view("next_tokens"), [0, 1], 5)
    writes.set(other, [*range(8)])
    arrive(fixture.bound.write(writes=writes, stream=fixture.stream))


def _set_drafts(fixture: World) -> None:
    fixture.advance(range(hook_calls.ENTERED))
    fixture.draft({0: [], 1: []})


def _stream(fixture: World) -> None:
    """Work on a stream of its own that another one waits for; all of it is dropped, and no ticket is waited for."""
    mine, fixture.stream = fixture.stream, fixture.device.stream()
    hook_calls.array(fixture)
    hook_calls.copy_out(fixture)
    mine.wait(fixture.device.event(fixture.stream))
    fixture.bound.timed_event(stream=fixture.stream)
    fixture.stream = mine
    arrive(hook_calls.scalar(fixture))


def _to_new_memory(value: object) -> Callable[[World], None]:
    def act(fixture: World) -> None:
        view = View.contiguous(fixture.device.allocate(1 << 13), 0, (1 << 10,), INT64)
        fixture.bound.async_set_value(target=view, value=value, stream=fixture.stream)
        given = View(view.memory, 0, (1 << 9,), (0,), INT64)
        arrive(fixture.bound.async_set_value(target=view[::-2], value=given, stream=fixture.stream))

    return act


def _reader(fixture: World) -> None:
    """A reader on another stream, and writes behind it and behind a copy out."""
    reader = fixture.device.stream()
    fixture.state.add_reader(None, fixture.device.event(reader))
    fixture.device.copy_out(fixture.state.memory, [ByteRange(0, 64), ByteRange(128, 64)], reader)
    arrive(hook_calls.strided(fixture))


def states(fixture: World) -> None:
    """A state that is dropped."""
    fixture.bound.state(hook_calls.SIZES, name="short-lived")


def _refused(fixture: World) -> None:
    """A full range of refusals: of the value, the target and the ranges."""
    bound, view = fixture.bound, fixture.state.view("seed")
    for value in (1.5, [1, 2], None, fixture.state.view("top_p")):
        assert_raises(HalError, partial(bound.async_set_value, target=view, value=value, stream=fixture.stream), "it")
    past = [ByteRange(fixture.state.memory.nbytes, 8)]
    copy = partial(bound.copy_out, memory=fixture.state.memory, parts=past, stream=fixture.stream)
    assert_raises(HalError, copy, "a copy past the end")


MORE: dict[str, Callable[[World], None]] = {
    "a write to several": _write_several,
    "drafts": _set_drafts,
    "a stream that is dropped": _stream,
    "a fill of new memory": _to_new_memory(3),
    "an array to new memory": _to_new_memory(np.arange(1 << 10)),
    "a reader": _reader,
    "a state": lambda fixture: states(fixture),
    "refusals": _refused,
}
"""Calls that leave the state's model as it is."""


OUTLIVE = 8
"""Events that are kept while their device is closed."""
Held = Callable[[], dict[str, int]]


def kept_by(turn: Callable[[], object], held: Held) -> dict[str, int]:
    """Return the objects that each window of turns adds, counted by kind; empty once one window adds none."""
    for _ in range(ROUNDS):
        turn()
    kept, after = {}, held()
    for _ in range(WINDOWS):
        before = after
        for _ in range(ROUNDS):
            turn()
        after = held()
        kept = {name: count - before.get(name, 0) for name, count in after.items()}
        kept = {name: more for name, more in kept.items() if more > ROUNDS // 4}
        if not kept:
            break
    return kept


def held_by(own: Any) -> Held:  # noqa: ANN401 (an opened device with the fault OutOfRoom, or Given)
    """Return a function that counts the device's memory and the objects that its primitives gave."""
    below = counted(own) if hasattr(own, "primitives") else {}

    def held() -> dict[str, int]:
        gc.collect()
        own.allocate(1)  # a device releases unreferenced memory when it allocates
        blocks: list[Any] = own.given
        return {"blocks of allocate()": sum(one() is not None for one in blocks), **below}

    return held


@guarantee(26)
@pytest.mark.parametrize("what", [*CALLS, *MORE])
def test_g26_calls_keep_no_device_memory_and_no_native_object(kit: Kit, what: str) -> None:
    """Counted where the device allocates, and where it asks its primitives: a process shows no loss of 64 bytes."""
    with under(kit, faults.OutOfRoom) as (laid, _):
        fixture = hook_calls.working(laid)
        act = MORE.get(what, partial(hook_calls.again, what=what))
        kept = kept_by(lambda: act(fixture), held_by(laid.device))
    assert not kept, f"each {ROUNDS} rounds of {what} leave {kept} more"


@guarantee(26, requires="primitives")
def test_g26_events_that_outlive_their_device_are_destroyed_with_their_last_reference(kit: Kit) -> None:
    one = Kit(kit.subject, kit.effort)
    device, made = one.device, counted(one.device)
    events: list[Any] = [device.event(device.default_stream) for _ in range(OUTLIVE)]
    if one.capabilities.timed_events:
        events += [one.bound.timed_event(stream=device.default_stream) for _ in range(OUTLIVE)]
    one.bound.close()
    many, before = len(events), made["event_create"]
    events.clear()
    gc.collect()
    destroyed = before - made["event_create"]
    assert destroyed == many, f"of {many} events that were dropped after their device was closed, {destroyed} went"


class Given(Lie):
    """A mixin over a device that keeps weak references to the memory it gives."""

    def allocate(self, nbytes: int) -> Memory:
        """Note it."""
        memory: Memory = super().allocate(nbytes)  # type: ignore[misc]
        self.__dict__.setdefault("given", []).append(weakref.ref(memory))
        return memory


FAILING: dict[str, tuple[type[faults.Fault], hook_calls.HookCall]] = {
    **{what: (faults.FailingWrites, hook_calls.CALLS[what]) for what in ("an array", "strided", "insert", "submit")},
    "copy_out": (faults.FailingCopies, hook_calls.copy_out),
}
"""Calls, and the fault by which the driver refuses each."""


@guarantee(26, also=(8,))
@pytest.mark.parametrize("what", FAILING)
def test_g26_calls_that_fail_keep_nothing_either(kit: Kit, what: str) -> None:
    """The paths of errors return all memory and objects that they took."""
    fault, call = FAILING[what]
    with under(kit, fault) as (laid, fuse):
        fixture, own = hook_calls.working(laid), laid.device
        lay_over(own, Given)

        def turn() -> None:
            fuse.at = 1
            assert_raises(faults.CopyFailed, lambda: call(fixture), f"{what}, which the driver refuses")

        kept = kept_by(turn, held_by(own))
    assert not kept, f"each {ROUNDS} times that {what} fails leave {kept} more"
