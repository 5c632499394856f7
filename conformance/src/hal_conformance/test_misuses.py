"""Misuses of every call, each refused by name and without effect; also streams of another opened device (G26)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hal_core.errors import HalError, InvalidValue
from hal_core.group import ALONE
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_core.memory.writes import Writes
from hal_core.output.sinks import MemorySink
from hal_core.output.ticket import OutputTicket
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind

from .fixtures import hook_calls
from .fixtures.world import World
from .harness.asserts import assert_no_error, assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Kit
from .test_vendor_mistakes import another

ENTERED = range(hook_calls.ENTERED)
Misuse = tuple[str, str, Callable[[], object]]
"""The call's name, the argument that its error names ("" for any), and the call."""


class Calls:
    """Every call of an opened device, right but for the arguments that a test changes."""

    def __init__(self, fixture: World) -> None:
        self.fixture, self.bound = fixture, fixture.bound
        self.value = View.contiguous(fixture.device.allocate(64), 0, (8,), dtype_of("int64"))

    def arguments(self) -> dict[str, dict[str, Any]]:
        """Return the right arguments of each call."""
        fixture, state = self.fixture, self.fixture.state
        step = Step(fixture.steps + 1, {fixture.name: np.array([*ENTERED], np.int32)})
        writes, stream = Writes(), {"stream": fixture.stream}
        writes.set(self.value, 7)
        task = Task(TaskKind.PREEMPTED, 0, fixture.model.residents[0].admitted)
        return {
            "async_set_value": {"target": state.view("next_tokens"), "value": 3, **stream},
            "write": {"writes": writes, **stream},
            "insert_tasks": {"state": state, "tasks": [task], **stream},
            "update_inputs": {"state": state, "step": step, **stream},
            "save_output": {"state": state, "step": step, "sink": MemorySink(), **stream},
            "broadcast_tokens": {"state": state, "group": ALONE, **stream},
            "set_drafts": {"state": state, "step": fixture.advanced, "drafts": {0: [4]}, **stream},
            "copy_out": {"memory": state.memory, "parts": [ByteRange(0, 8)], **stream},
        }

    def wrong(self, name: str, argument: str, given: object) -> Misuse:
        """Return a call with one wrong argument."""
        arguments = self.arguments()[name] | {argument: given}
        return name, argument, lambda: getattr(self.bound, name)(**arguments)


def streams(calls: Calls) -> Iterator[tuple[str, Misuse]]:
    """Yield calls with values that are no streams."""
    for name in calls.arguments():
        for given in (None, "0", object(), type(calls.fixture.stream)):
            yield f"{name} on {given!r}", calls.wrong(name, "stream", given)


def states(calls: Calls) -> Iterator[tuple[str, Misuse]]:
    """Yield calls with values that are no states of the device."""
    for name in ("insert_tasks", "update_inputs", "save_output", "broadcast_tokens", "set_drafts"):
        for given in (None, "target", calls.fixture.state.memory):
            yield f"{name} of {given!r}", calls.wrong(name, "state", given)


def steps(calls: Calls) -> Iterator[tuple[str, Misuse]]:
    """Yield calls with a step that does not fit the state."""
    name, state = calls.fixture.name, calls.fixture.state
    for call in ("update_inputs", "save_output"):
        number = calls.fixture.steps + 1
        few: dict[str, Any] = {
            "another state": Step(number, {"another": np.array([0], np.int32)}),
            "a slot that does not exist": Step(number, {name: np.array([0, state.sizes.num_slots], np.int32)}),
            "too many log-probabilities": Step(number, {name: np.array([0], np.int32)}, logprobs=99),
        }
        for case, step in few.items():
            yield f"{call} of a step with {case}", calls.wrong(call, "step", step)


def ranges(calls: Calls) -> Iterator[tuple[str, Misuse]]:
    """Yield copies of what lies outside the memory or is no range, and drafts that do not fit."""
    end = calls.fixture.state.memory.nbytes
    others: dict[str, list[object]] = {
        "parts": [None, ByteRange(0, 8), [(0, 8)], iter([ByteRange(0, 8)])],
        "memory": [None, calls.fixture.state],
    }
    for argument, given in ((argument, given) for argument, wrong in others.items() for given in wrong):
        yield f"copy_out with {argument} = {given!r}", calls.wrong("copy_out", argument, given)
    yield "write of a list", calls.wrong("write", "writes", [1])
    for case, parts in {
        "one byte past the end": [ByteRange(0, 8), ByteRange(end - 7, 8)],
        "all past the end": [ByteRange(end + 64, 1)],
        "an empty range past the end": [ByteRange(end + 1, 0)],
        "a negative offset": [ByteRange(-8, 8)],
        "a negative length": [ByteRange(8, -8), ByteRange(0, 8)],
    }.items():
        yield f"copy_out of {case}", calls.wrong("copy_out", "parts", parts)
    for case, drafts in {
        "too many": {0: [1, 2, 3]}, "a slot that does not exist": {99: [1]}, "an empty slot": {4: [1]},
        "one wrong slot of two": {0: [1], 99: [1]},
    }.items():  # fmt: skip
        name, _, call = calls.wrong("set_drafts", "drafts", drafts)
        yield f"set_drafts of {case}", (name, "", call)


MISUSES: dict[str, Callable[[Calls], Iterator[tuple[str, Misuse]]]] = {
    "streams": streams, "states": states, "steps": steps, "ranges": ranges,
}  # fmt: skip


@guarantee(26)
@pytest.mark.parametrize("what", MISUSES)
def test_g26_misuses_of_every_call_are_refused_and_change_nothing(kit: Kit, what: str) -> None:
    fixture = hook_calls.working(kit)
    calls, before = Calls(fixture), kit.bound.counters()
    for why, (name, argument, call) in MISUSES[what](calls):
        error = assert_raises(HalError, call, why)
        assert_says(error, device=kit.bound.name, hook=name, argument=argument or None)
        spent = kit.bound.counters().submissions - before.submissions
        assert not spent, f"{why} was refused, but made {spent} submissions"
    fixture.check(f"misuses of {what} were refused")
    hook_calls.make(hook_calls.array, fixture, f"a right call after misuses of {what}")


@guarantee(26)
def test_g26_a_state_and_memory_of_another_opened_device_are_refused(kit: Kit) -> None:
    """By each call that takes one; also a write to several memories of which one is another device's."""
    with another(kit) as other:
        fixture, theirs = hook_calls.working(kit), hook_calls.working(other)
        calls, state = Calls(fixture), theirs.state
        misuses = [calls.wrong(name, "state", state) for name in ("insert_tasks", "update_inputs", "save_output")]
        misuses += [calls.wrong(name, "state", state) for name in ("broadcast_tokens", "set_drafts")]
        misuses.append(calls.wrong("copy_out", "memory", state.memory))
        misuses.append(calls.wrong("async_set_value", "target", state.view("seed")))
        misuses.append(calls.wrong("async_set_value", "value", state.view("next_tokens")))
        for first in (True, False):
            writes = Writes()
            for view in (calls.value, state.view("seed")) if first else (state.view("seed"), calls.value):
                writes.set(view, 5)
            misuses.append(calls.wrong("write", "writes", writes))
        for taken in (hook_calls.save(theirs), hook_calls.array(fixture)):
            misuses.append(("take", "ticket", partial(fixture.state.take, cast(OutputTicket, taken))))
        for name, argument, call in misuses:
            error = assert_raises(HalError, call, f"{name} with another opened device's {argument}")
            assert_says(error, device=kit.bound.name, hook=name, argument=argument)
        fixture.check("states of another opened device were refused")
        theirs.check("another opened device refused its state")


Refused = Callable[[World, Any], object]


def _set(value: Any) -> Refused:  # noqa: ANN401 (any value)
    return lambda fixture, stream: fixture.bound.async_set_value(
        target=fixture.state.view("next_tokens"), value=value, stream=stream
    )


def _on_device(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    value = fixture.state.view("top_p")
    return fixture.bound.async_set_value(target=fixture.state.view("min_p"), value=value, stream=stream)


def _write(fixture: World, stream: Any) -> object:  # noqa: ANN401 (another device's)
    writes, bare = Writes(), View.contiguous(fixture.device.allocate(64), 0, (8,), dtype_of("int64"))
    writes.fill(fixture.state.view("next_tokens"), [0, 1], 5)
    writes.set(bare, 3)
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
