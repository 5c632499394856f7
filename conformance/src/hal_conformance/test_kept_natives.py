"""Device memory and runtime objects that calls lose a little at a time (G26)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from .fixtures import hook_calls
from .harness.asserts import assert_raises
from .harness.guarantees import guarantee
from .harness.lies import Lie, lay_over
from .harness.natives import counted
from .kit import Kit
from .liars import faults
from .test_faults import under

if TYPE_CHECKING:
    from hal_core.memory.views import Memory

ROUNDS, WINDOWS = 40, 8
"""Rounds of a window, and most windows. A loss appears in each window; a pool that fills, as of fences, does not."""
CALLS = (*hook_calls.VALUES, "submit", "copy_out", "onto itself", "insert and leave", "a step")


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
@pytest.mark.parametrize("what", CALLS)
def test_g26_calls_keep_no_device_memory_and_no_native_object(kit: Kit, what: str) -> None:
    """Counted where the device allocates, and where it asks its primitives: a process shows no loss of 64 bytes."""
    with under(kit, faults.OutOfRoom) as (laid, _):
        fixture = hook_calls.working(laid)
        kept = kept_by(lambda: hook_calls.again(fixture, what), held_by(laid.device))
    assert not kept, f"each {ROUNDS} rounds of {what} leave {kept} more"


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
