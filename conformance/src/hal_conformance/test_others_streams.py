"""A stream of another opened device, given to a call, is refused before anything is queued (G26)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.memory.writes import Writes
from hal_core.output.sinks import MemorySink

from .fixtures import hook_calls
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit
from .test_vendor_mistakes import another

Refused = Callable[[World, Any], object]


def _set(value: Any) -> Refused:  # noqa: ANN401 (any value)
    return lambda fixture, stream: fixture.bound.async_set_value(
        target=fixture.state.view("next_tokens"), value=value, stream=stream
    )


def _on_device(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    value = fixture.state.view("top_p")
    return fixture.bound.async_set_value(target=fixture.state.view("min_p"), value=value, stream=stream)


def _write(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    writes, beside = Writes(), View.contiguous(fixture.device.allocate(64), 0, (8,), dtype_of("int64"))
    writes.fill(fixture.state.view("next_tokens"), [0, 1], 5)
    writes.set(beside, 3)
    return fixture.bound.write(writes=writes, stream=stream)


def _insert(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    tasks = [hook_calls.entering(fixture, hook_calls.ENTERED)]
    return fixture.bound.insert_tasks(state=fixture.state, tasks=tasks, stream=stream)


def _update(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    step = fixture.step(range(hook_calls.ENTERED))
    return fixture.bound.update_inputs(state=fixture.state, step=step, stream=stream)


def _save(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    step = fixture.step(range(hook_calls.ENTERED))
    return fixture.bound.save_output(state=fixture.state, step=step, sink=MemorySink(), stream=stream)


def _draft(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    step: Any = fixture.advanced
    return fixture.bound.set_drafts(state=fixture.state, step=step, drafts={0: [4]}, stream=stream)


def _copy_out(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    return fixture.bound.copy_out(memory=fixture.state.memory, parts=[ByteRange(0, 64)], stream=stream)


def _order(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    fixture.bound.order_after_reads(memory=fixture.state.memory, stream=stream)
    return None


CALLS: Mapping[str, tuple[str, Refused]] = {
    "a scalar": ("async_set_value", _set(7)),
    "an array": ("async_set_value", _set(np.arange(hook_calls.SIZES.num_slots))),
    "a value on the device": ("async_set_value", _on_device),
    "a write to several memories": ("write", _write),
    "a request": ("insert_tasks", _insert),
    "a step": ("update_inputs", _update),
    "an output": ("save_output", _save),
    "drafts": ("set_drafts", _draft),
    "a copy out": ("copy_out", _copy_out),
    "order_after_reads": ("order_after_reads", _order),
    "a timed event": ("timed_event", lambda fixture, stream: fixture.bound.timed_event(stream=stream)),
}
"""Description to the call's name and the call."""


@guarantee(26)
def test_g26_a_stream_of_another_opened_device_is_refused(kit: Kit) -> None:
    """Also behind a reader, for whose event the other device's stream would have to wait; its events are allowed."""
    with another(kit) as other:
        theirs, fixture = other.device.stream(), hook_calls.working(kit)
        arrive(_settable(other, theirs))
        arrive(hook_calls.scalar(fixture))  # streams of this class are known to both devices by now
        with kit.held(fixture.stream, "a call on a stream of another opened device"):
            before = kit.bound.counters(), other.bound.counters()  # a device may hold a stream by work of its own
            fixture.state.add_reader(None, kit.device.event(fixture.stream))
            for what, (hook, call) in CALLS.items():
                why = f"{what} on a stream of another opened device"
                error = assert_raises(InvalidValue, partial(call, fixture, theirs), why)
                assert_says(error, device=kit.bound.name, hook=hook, argument="stream")
                now = kit.bound.counters(), other.bound.counters()
                spent = [after.submissions - was.submissions for was, after in zip(before, now, strict=True)]
                assert spent == [0, 0], f"{why} was refused, but this and the other device counted {spent} submissions"
            waits = "the other device's stream, which must not wait for this one's reader"
            assert_no_error(lambda: theirs.synchronize(kit.effort.hang / 2), waits)
        fixture.stream.wait(other.device.event(theirs))
        fixture.check("calls on a stream of another opened device were refused")
        hook_calls.make(hook_calls.array, fixture, "a call on an own stream after them")


def _settable(other: Kit, stream: Any) -> Any:  # noqa: ANN401 (a stream, a ticket)
    """Set a value on a stream of the device that made it."""
    view = View.contiguous(other.device.allocate(64), 0, (8,), dtype_of("int64"))
    return other.bound.async_set_value(target=view, value=1, stream=stream)
