"""Calls on one stream take effect in order (G4): equal values, and timed events."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View

from .fixtures.hook_cases import HOOK_CASES, hook_cases
from .fixtures.sizes import sizes
from .fixtures.stream_cases import copied
from .harness import backdoor
from .harness.backdoor import PATIENCE, arrive
from .harness.guarantees import guarantee
from .kit import Kit

if TYPE_CHECKING:
    from hal_core.streams import Stream, TimedEvent

    from .fixtures.prepared_calls import Make, PreparedCall

Changed = np.ndarray[Any, np.dtype[np.bool_]]
"""Whether each byte was changed."""

EACH = 3
"""Elements of a field, or words of a memory without fields, that are written again."""


AGAIN = ("scalar", "array", "device value", "copied from it")
"""Forms of a value that is written before a call and again after it; the last reads what the call writes."""


@guarantee(4, also=(1, 2))
@pytest.mark.parametrize("hook", HOOK_CASES)
def test_g04_a_value_written_again_after_a_call_is_written_again(kit: Kit, hook: str) -> None:
    """A device that leaves out a write of the value that it wrote there last would keep what the call wrote.

    Each form is the last before the call: of each call, or, as there are many of it, of some values to be set."""
    for number, (what, make) in enumerate(hook_cases(kit, hook)):
        changed = changed_by(kit, what, make)
        several = hook == "async_set_value"
        for first in [number % len(AGAIN)] if several else range(len(AGAIN)):
            aside = number // len(AGAIN) if several else number + first
            write_again(kit, begun(kit, make), changed, first, what, aside=aside % 2 == 1)


def write_again(kit: Kit, call: PreparedCall, changed: Changed, first: int, what: str, *, aside: bool) -> None:
    """Write to some elements that a call changes, or from them, before the call and after it; forms take turns.

    ``aside``: the call is made on another stream, which waits for the first one, and for which that one waits."""
    __tracebackhide__ = True
    device, stream, places = kit.device, kit.device.default_stream, elements(call, changed)
    assert places, f"the kit's own call changes nothing: {what}"
    other = device.allocate(8 * len(places))
    put, should = [], [call.before[at : at + view.dtype.itemsize] for view, at in places]
    backdoor.put(device, other, [(8 * at, data.tobytes()) for at, data in enumerate(should)], stream)
    for at, ((view, _), data) in enumerate(zip(places, should, strict=True)):
        form, beside = AGAIN[(first + at) % len(AGAIN)], View.contiguous(other, 8 * at, (1, 1), view.dtype)
        value: Any = data.view(view.dtype.storage).reshape(1, 1).copy()
        if form == "copied from it":
            put.append((beside, view))
        else:
            put.append((view, {"array": value, "scalar": value[0, 0].item(), "device value": beside}[form]))
    for target, value in reversed(put):
        kit.bound.async_set_value(target=target, value=value, stream=stream)
    on = device.stream() if aside else stream
    on.wait(device.event(stream))
    ticket = call.act(on)
    stream.wait(device.event(on))
    seen = copied(kit, call.memory, stream)
    for target, value in put:  # the one that was written last comes first
        kit.bound.async_set_value(target=target, value=value, stream=stream)
    call.complete(ticket)
    arrive(seen)
    got = {memory: backdoor.read(device, memory, stream) for memory in (call.memory, other)}
    for (target, value), (view, at), data in zip(put, places, should, strict=True):
        right = seen.data[0][at : at + len(data)] if value is view else data
        found = got[target.memory][target.offset : target.offset + len(data)]
        assert (found == right).all(), (
            f"{target} was set to {value} before and after {what}: it holds {found.tolist()}, not {right.tolist()}"
        )


def begun(kit: Kit, make: Make) -> PreparedCall:
    """Return a new call whose memory has the bytes that must be there before it."""
    call, stream = make(kit), kit.device.default_stream
    for memory, data in [(call.memory, call.before), *call.sources]:
        backdoor.write(kit.device, memory, 0, data, stream)
    return call


def changed_by(kit: Kit, what: str, make: Make) -> Changed:
    """Make a call of its own; return whether it changes each byte of its memory."""
    __tracebackhide__ = True
    call, stream = begun(kit, make), kit.device.default_stream
    call.complete(call.act(stream))
    got = backdoor.read(kit.device, call.memory, stream)[: len(call.before)]
    wrong = call.wrong(got)
    assert not wrong, f"after {what}: {wrong}"
    changed: Changed = got != call.before
    return changed


def elements(call: PreparedCall, changed: Changed) -> list[tuple[View, int]]:
    """Return some of the elements with a changed byte, each with its offset: of each field, or of words."""
    if call.state is None:
        words = View.contiguous(call.memory, 0, (1, len(changed) // 8), dtype_of("int64"))
        views = [words]
    else:
        views = [call.state.view(name) for name in call.state.layout.fields]
    found = []
    for view in views:
        item, (rows, width) = view.dtype.itemsize, view.shape
        cells = changed[view.offset : view.offset + rows * width * item].reshape(rows, width, item).any(axis=-1)
        places = np.argwhere(cells)
        for row, column in places[:: -(-len(places) // EACH) or 1].tolist():
            element = view[row : row + 1, column : column + 1]
            found.append((element, element.offset))
    return found


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


@guarantee(4, requires="timed_events")
def test_g04_timed_events_are_of_the_devices_time_however_late_they_are_read(kit: Kit) -> None:
    """Two in a row, and a third after more nanoseconds than 32 bits count; the second is read last."""
    stream, span = kit.device.stream(), max(sizes(kit, "nanoseconds between timed events")) * 1.01e-9
    began = time.monotonic()
    first, second = recorded(kit, stream), recorded(kit, stream)
    assert kit.device.event(stream).wait(PATIENCE), "an event of an idle stream has not passed"
    near = time.monotonic() - began
    time.sleep(span)
    third = recorded(kit, stream)
    assert third.wait(PATIENCE), "a timed event on an idle stream does not pass"
    far = time.monotonic() - began
    time.sleep(HELD_FOR)
    for name, (one, other), least, most in (
        ("a first and a third", (third, first), span, far),
        ("a second and a third", (third, second), span, far),
        ("two in a row", (second, first), 0.0, near),
    ):
        assert one.wait(PATIENCE)
        assert other.wait(PATIENCE)
        found, least, most = one.seconds_since(other), least * (1 - DRIFT) - RESOLUTION, most * (1 + DRIFT) + RESOLUTION
        assert least <= found <= most, f"{found} s between {name} timed event, but should be {least} to {most} s"


@guarantee(4, requires="timed_events")
def test_g04_a_time_stays_that_of_its_events_whatever_is_timed_after(kit: Kit) -> None:
    stream = kit.device.stream()
    for many in sizes(kit, "timed events at once"):
        first, second = recorded(kit, stream), recorded(kit, stream)
        assert second.wait(PATIENCE), "a timed event on an idle stream does not pass"
        seconds = second.seconds_since(first)
        others = [recorded(kit, stream) for _ in range(many)]
        assert others[-1].wait(PATIENCE), "a timed event on an idle stream does not pass"
        again = second.seconds_since(first)
        assert again == seconds, f"{again} s between two events, but {seconds} before {many} others were recorded"
        order = [after.seconds_since(before) for before, after in pairwise((second, *others))]
        assert min(order) >= 0, f"the device's time goes back {min(order)} s among {many} events that are kept"


@guarantee(4)
def test_g04_timed_events_measure_their_stream(kit: Kit) -> None:
    device = kit.device
    if not kit.capabilities.timed_events:
        found = kit.bound.timed_event(stream=device.stream())
        assert found is None, "timed_event returned an event, but the capabilities do not say timed_events"
        return
    memory, stream, other = device.allocate(64), device.stream(), device.stream()
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
        other.wait(device.event(stream))
        fourth = recorded(kit, other)
        assert second.wait(PATIENCE), "a timed event does not pass after the work before it"
        assert third.wait(PATIENCE)
        assert fourth.wait(PATIENCE), "a timed event does not pass behind another stream's"
        most = time.monotonic() - called
        total, parts = third.seconds_since(first), (second.seconds_since(first), third.seconds_since(second))
        assert min(parts) >= 0, f"the device's time goes back: {parts} s between three events in order"
        assert abs(sum(parts) - total) <= 2 * RESOLUTION + DRIFT * total, f"{parts} s are not {total} s together"
        across, after = fourth.seconds_since(first), fourth.seconds_since(third)
        assert after >= -RESOLUTION, f"the device's time goes back from one stream to another: {after} s"
        least, most = least * (1 - DRIFT) - RESOLUTION, most * (1 + DRIFT) + RESOLUTION
        assert least <= parts[0], f"a stream was held for {least} s between two events {parts[0]} s apart"
        assert least <= across <= most, f"{across} s to an event of another stream, should be {least} to {most} s"
        assert total <= most, f"{total} s between two events of which the host saw {most} s"
