"""Every hook: errors (G26), names (G27) and slots in use (G28)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import hal_core
import numpy as np
import pytest
from hal_core.errors import DeviceClosed, HalError
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_core.slots.admission import Request, SamplingParams, admit
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from .fixtures.batches import draw_world
from .fixtures.block import Block
from .fixtures.stepping import run_step
from .fixtures.world import World
from .harness.asserts import assert_raises, assert_says
from .harness.backdoor import arrive
from .harness.guarantees import guarantee
from .kit import Draw, Kit, examples
from .opening import DEVICES
from .test_readers import update_held

A_MOMENT = 0.1
"""Seconds in which an independent write is done; a write that must wait is never done."""
CORE = Path(hal_core.__file__).parent


def misuses(fixture: World, block: Block) -> dict[str, tuple[str, Callable[[], object]]]:
    """Return the misuses: description to the hook and the call."""
    bound, stream, state = fixture.bound, fixture.stream, fixture.state
    one = Step(1, {fixture.name: np.array([0])})
    stranger = admit(Request("stranger", [1]), state.layout)
    target = block.view((4,), dtype_of("int32"))
    target2 = state.view("top_k")

    def set_value(target: object, value: object) -> Callable[[], object]:
        return lambda: bound.async_set_value(target=target, value=value, stream=stream)

    def save(step: Step) -> Callable[[], object]:
        return lambda: bound.save_output(state=state, step=step, sink=fixture.sink, stream=stream)

    return {
        "a value of another class": ("async_set_value", set_value(target, 1.5)),
        "a value out of range": ("async_set_value", set_value(target2, 2**31)),
        "a value of another shape": ("async_set_value", set_value(target, [1, 2])),
        "a value that is none": ("async_set_value", set_value(target, None)),
        "a target that is not a tensor": ("async_set_value", set_value("token_ids", 1)),
        "a device value of another type": ("async_set_value", set_value(target, block.view((4,), dtype_of("int64")))),
        "a slot that does not exist": (
            "insert_tasks",
            lambda: bound.insert_tasks(
                state=state, tasks=[Task(TaskKind.PREFILL, 99, stranger, 0, 1, [0])], stream=stream
            ),
        ),
        "a state that is none": (
            "insert_tasks",
            lambda: bound.insert_tasks(state="target", tasks=[], stream=stream),  # type: ignore[arg-type]
        ),
        "a state that is none, saved": (
            "save_output",
            lambda: bound.save_output(state=None, step=one, sink=fixture.sink, stream=stream),  # type: ignore[arg-type]
        ),
        "a step of another state": ("save_output", save(Step(1, {"another": np.array([0])}))),
        "a step over a slot that does not exist": ("save_output", save(Step(1, {fixture.name: np.array([99])}))),
        "too many log-probabilities": ("save_output", save(Step(1, {fixture.name: np.array([0])}, logprobs=999))),
    }


@guarantee(26)
def test_g26_errors_name_device_hook_argument_and_cure(kit: Kit) -> None:
    fixture, block = World(kit, StateConfig(num_slots=2, max_model_len=8)), Block(kit)
    for why, (hook, call) in misuses(fixture, block).items():
        assert_says(assert_raises(HalError, call, why), device=kit.bound.name, hook=hook)
    fixture.check("every misuse was refused")
    block.check("every misuse was refused")


@guarantee(26)
def test_g26_memory_of_another_opened_device_is_refused(kit: Kit) -> None:
    other = kit.open()
    mine = Block(kit)
    foreign = mine.view((4,), dtype_of("int64"))
    own = other.device.allocate(64)
    target = View.contiguous(own, 0, (4,), dtype_of("int64"))
    for t, v, argument in ((foreign, 1, "target"), (target, foreign, "value")):
        error = assert_raises(
            HalError,
            partial(other.async_set_value, target=t, value=v, stream=other.default_stream),
            f"a {argument} on another opened device",
        )
        assert_says(error, device=other.name, hook="async_set_value", argument=argument)
    other.close()
    mine.check("its view was refused as target by another device")


@guarantee(26)
def test_g26_a_closed_device_refuses_every_call(kit: Kit) -> None:
    bound = kit.open()
    state = bound.state(StateConfig(num_slots=1, max_model_len=4))
    stream = bound.default_stream
    bound.close()
    bound.close()  # has no effect the second time
    error = assert_raises(
        DeviceClosed,
        lambda: bound.async_set_value(target=state.view("seed"), value=1, stream=stream),
        "a call on a closed device",
    )
    assert error.cure, f"{error} names no cure"
    assert error.device == bound.name, f"{error!r} names {error.device!r}, but should name {bound.name!r}"


@cache
def sources() -> list[tuple[str, ast.Module]]:
    """Return every module of the core except the devices in it."""
    found = []
    apart = {*(point.name for point in metadata.entry_points(group=DEVICES))}
    for path in sorted(CORE.rglob("*.py")):
        parts = path.relative_to(CORE).parts
        if parts[0] not in apart:
            found.append(("/".join(parts), ast.parse(path.read_text(encoding="utf-8"))))
    return found


@guarantee(27)
def test_g27_the_core_imports_no_device(kit: Kit) -> None:
    for name, tree in sources():
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 0)
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            wrong = [m for m in modules if m.partition(".")[0].startswith("hal_") and m.partition(".")[0] != "hal_core"]
            assert not wrong, f"{name}:{line} imports {wrong}, but the core may import no device"


@guarantee(27)
def test_g27_the_core_compares_no_device_name(kit: Kit) -> None:
    names = {point.name for point in metadata.entry_points(group=DEVICES)}
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                attributes = [
                    part for part in ast.walk(node) if isinstance(part, ast.Attribute) and part.attr == "name"
                ]
                constants = [
                    part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and part.value in names
                ]
                assert not (attributes and constants), f"{name}:{node.lineno} compares a name with {constants}"


@guarantee(27)
@examples(0.5)
def test_g27_a_device_by_another_name_behaves_alike(kit: Kit, draw: Draw) -> None:
    device = kit.device
    true_name = device.name
    device.name = draw(st.sampled_from(["", "renamed", "npu", "cpu"]), "name")
    try:
        fixture = draw_world(draw, kit)
        fixture.check("insert_tasks")
        fixture.output(run_step(draw, fixture))
    finally:
        device.name = true_name


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"))
def test_g28_a_step_is_put_on_its_stream_and_not_waited_for(kit: Kit) -> None:
    fixture = World(kit, StateConfig(num_slots=2, max_model_len=8))
    fixture.enter([Task(TaskKind.PREFILL, 0, fixture.admit(Request("r", [1, 2])), 0, 2, [0])])
    with kit.held(fixture.stream) as latch:
        stepped = update_held(fixture, latch, (0,))
        assert not stepped.done(), "the ticket of update_inputs is done, but its stream is held"
    arrive(stepped)


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"))
@pytest.mark.parametrize("how", [TaskKind.PREEMPTED, TaskKind.ABORTED], ids=["preempted", "aborted"])
@pytest.mark.parametrize("slot", range(3))
def test_g28_a_slot_is_not_written_before_its_last_reader_has_passed(kit: Kit, slot: int, how: TaskKind) -> None:
    fixture = World(kit, StateConfig(num_slots=3, max_model_len=16, block_size=2))
    tasks = []
    for each in range(3):
        request = fixture.admit(Request(f"r{each}", [1, 2], SamplingParams(max_tokens=9)))
        tasks.append(Task(TaskKind.PREFILL, each, request, 0, 2, [each]))
    fixture.enter(tasks)
    fixture.put({"sampled_token_ids": np.arange(10, 13)})
    compute, other = fixture.stream, kit.device.stream()
    with kit.held(compute) as latch:
        stepped = update_held(fixture, latch, (0, 1, 2))
        fixture.stream = other
        new = fixture.admit(Request("new", [7, 8, 9], SamplingParams(max_tokens=9)))
        entered = fixture.insert(
            [Task(how, slot, tasks[slot].request), Task(TaskKind.PREFILL, slot, new, 0, 3, [5, 6])]
        )
        error = assert_raises(
            HalError, lambda: entered.wait(A_MOMENT), f"slot {slot}, whose reader is held, is written"
        )
        assert isinstance(error, TimeoutError), f"waiting for a write behind a held step raised {error!r}"
    for ticket in (stepped, entered):
        arrive(ticket)
    fixture.check("a slot was left and entered on another stream than its step")


@guarantee(28, requires=("async_h2d", "can_hold_stream", "overlapped_update"))
def test_g28_a_value_is_not_set_before_the_slots_last_reader_has_passed(kit: Kit) -> None:
    fixture = World(kit, StateConfig(num_slots=2, max_model_len=8))
    request = fixture.admit(Request("r", [1, 2]))
    fixture.enter([Task(TaskKind.PREFILL, 0, request, 0, 2, [0])])
    other = kit.device.stream()
    with kit.held(fixture.stream) as latch:
        stepped = update_held(fixture, latch, (0,))
        view = fixture.state.view("next_tokens")
        written = kit.bound.async_set_value(target=view, value=5, stream=other)
        error = assert_raises(HalError, lambda: written.wait(A_MOMENT), "a field, whose reader is held, is written")
        assert isinstance(error, TimeoutError), f"waiting for a write behind a held step raised {error!r}"
    arrive(stepped)
    arrive(written)
    fixture.model.cells["next_tokens"][...] = 5
    fixture.check("a field was set on another stream than the step that reads it")
