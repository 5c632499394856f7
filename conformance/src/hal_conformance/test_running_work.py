"""Work that has begun and not ended (G1), and work that no thread of the host waits for (G3)."""

from __future__ import annotations

import numpy as np
import pytest
from hal_core.devices.primitives import poll
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View

from .fixtures.hook_cases import HOOK_CASES
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.backdoor import PATIENCE, arrive
from .harness.bits import noise
from .harness.guarantees import guarantee
from .harness.waiters import come_true
from .kit import Kit
from .test_tickets import STREAMS, prepared, stream_of

BYTES, ROUNDS = 32 << 20, 5
"""Bytes of a copy that runs for milliseconds, longer than the host takes from its end to a look at its last bytes."""


@guarantee(1)
@pytest.mark.parametrize("way", ["query", "wait"])
def test_g01_a_copy_that_is_running_is_not_done(kit: Kit, way: str) -> None:
    """No latch shows this: work behind a held stream has not begun. The last bytes of a long copy are there last."""
    device, stream = kit.device, kit.device.default_stream
    memory = device.allocate(BYTES)
    view = View.contiguous(memory, 0, (BYTES // 8,), dtype_of("int64"))
    for turn in range(1, ROUNDS + 1):
        arrive(kit.bound.async_set_value(target=view, value=turn, stream=stream))
        copy = copied(kit, memory, stream)
        if way == "wait":
            arrive(copy)
        else:
            assert poll(copy.done, PATIENCE), f"a copy of {BYTES} bytes is not done after {PATIENCE} s"
        last = copy.data[0][BYTES - 8 : BYTES].tobytes()  # before anything else: the rest comes while the host looks
        assert last == turn.to_bytes(8, "little"), f"a copy is done by its {way}, but its last bytes are {last.hex()}"
        wrong = int((copy.data[0][:BYTES].view(np.int64) != turn).sum())
        assert not wrong, f"a copy is done by its {way}, but {wrong} of its elements are not there"


@guarantee(3, requires=("async_h2d", "async_d2h", "can_hold_stream"), also=(1,))
@pytest.mark.parametrize("which", STREAMS)
def test_g03_work_that_no_thread_waits_for_is_executed(kit: Kit, which: str) -> None:
    """The host only asks. A runtime that keeps commands until a wait (OpenCL before clFlush) must be told of them."""
    acts = [(told, act) for told, act in prepared(kit, tuple(HOOK_CASES)) if not told.startswith("save_output")]
    device, stream, other = kit.device, stream_of(kit, which), kit.device.stream()
    memory, should = device.allocate(4096), noise(7, 4096)
    for told, act in acts:
        come_true({f"{told}, on {which}, for which no thread waits": act(stream)}, kit.effort.hang)
    write = backdoor.put(device, memory, [(0, should.tobytes())], stream)
    event = device.event(stream)
    other.wait(event)
    copy = copied(kit, memory, other)
    come_true({"a copy on a stream that waits for another one's event": copy}, kit.effort.hang)
    assert poll(event.done, kit.effort.hang), f"an event on {which} has not passed, though no work is before it"
    come_true({f"the write before the event on {which}": write}, kit.effort.hang)
    assert (copy.data[0][:4096] == should).all(), "a copy behind an event has other bytes than were written before it"
