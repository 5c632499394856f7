"""Device memory and runtime objects that calls lose a little at a time (G26)."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from .fixtures import hook_calls
from .harness.guarantees import guarantee
from .harness.natives import counted
from .kit import Kit
from .liars import faults
from .test_faults import under

ROUNDS, WINDOWS = 40, 8
"""Rounds of one window, and most windows: a loss appears in each, and a pool that fills (of fences, say) does not."""
CALLS = (*hook_calls.VALUES, "submit", "copy_out", "insert and leave", "a step")


@guarantee(26)
@pytest.mark.parametrize("what", CALLS)
def test_g26_calls_keep_no_device_memory_and_no_native_object(kit: Kit, what: str) -> None:
    """Counted where the device allocates, and where it asks its primitives: a process shows no loss of 64 bytes."""
    with under(kit, faults.OutOfRoom) as (laid, _):
        fixture, own = hook_calls.working(laid), laid.device
        below = counted(own) if hasattr(own, "primitives") else {}

        def held() -> dict[str, int]:
            gc.collect()
            own.allocate(1)  # a device looks for memory that nobody holds when it allocates
            blocks: list[Any] = own.given  # type: ignore[attr-defined]  # the fault's
            return {"blocks of allocate()": sum(one() is not None for one in blocks), **below}

        for _ in range(ROUNDS):
            hook_calls.again(fixture, what)
        kept, after = {}, held()
        for _ in range(WINDOWS):
            before = after
            for _ in range(ROUNDS):
                hook_calls.again(fixture, what)
            after = held()
            kept = {name: count - before.get(name, 0) for name, count in after.items()}
            kept = {name: more for name, more in kept.items() if more > ROUNDS // 4}
            if not kept:
                break
    assert not kept, f"each {ROUNDS} rounds of {what} leave {kept} more"
