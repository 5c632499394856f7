"""Timed events are points of their stream's order, and note the device's time (G4)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .harness import backdoor
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .kit import Kit

if TYPE_CHECKING:
    from hal_core.streams import Stream, TimedEvent

HELD_FOR = 0.02
"""Seconds for which a stream is held."""
DRIFT = 0.01
"""The share by which the clocks of device and host may differ."""
RESOLUTION = 5e-6
"""Seconds: twice the resolution that vendors state for their timed events, rounded up."""
ROUNDS = 3
"""The later rounds use the events of earlier ones again."""


def recorded(kit: Kit, stream: Stream) -> TimedEvent:
    """Return a timed event after the work that is now on a stream."""
    __tracebackhide__ = True
    found = kit.bound.timed_event(stream=stream)
    assert found is not None, "timed_event returned None, but the capabilities say timed_events"
    return found


@guarantee(4)
def test_g04_timed_events_measure_their_stream(kit: Kit) -> None:
    device = kit.device
    if not kit.capabilities.timed_events:
        found = kit.bound.timed_event(stream=device.stream())
        assert found is None, "timed_event returned an event, but the capabilities do not say timed_events"
        return
    memory, stream = device.allocate(64), device.stream()
    for _ in range(ROUNDS):
        called = time.monotonic()
        first = recorded(kit, stream)
        assert first.wait(PATIENCE), "a timed event on an idle stream does not pass"
        passed = time.monotonic()
        with kit.held(stream, "timed_event"):
            written = backdoor.put(device, memory, [(0, bytes(64))], stream)
            second = recorded(kit, stream)
            if kit.can_hold:
                assert not second.wait(HELD_FOR), "a timed event passed on a held stream"
            least = time.monotonic() - passed if kit.can_hold else 0.0
        arrive(written)
        third = recorded(kit, stream)
        assert second.wait(PATIENCE), "a timed event does not pass after the work before it"
        assert third.wait(PATIENCE)
        most = time.monotonic() - called
        whole, parts = third.seconds_since(first), (second.seconds_since(first), third.seconds_since(second))
        assert min(parts) >= 0, f"the device's time goes back: {parts} s between three events in order"
        assert abs(sum(parts) - whole) <= 2 * RESOLUTION + DRIFT * whole, f"{parts} s are not {whole} s together"
        least, most = least * (1 - DRIFT) - RESOLUTION, most * (1 + DRIFT) + RESOLUTION
        assert least <= parts[0], f"a stream was held for {least} s between two events {parts[0]} s apart"
        assert whole <= most, f"{whole} s between two events of which the host saw {most} s"
