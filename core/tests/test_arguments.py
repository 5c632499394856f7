"""Arguments of a wrong kind, on every hook: refused by name before any work is done; valid ones are never blamed."""

import pytest
from hal_core import Request, Task, TaskBatch, TaskKind, admit, hookimpl
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import CpuDevice
from hal_core.devices.sync import SyncStream
from hal_core.errors import InvalidValue, OutOfMemory
from hal_core.group import Group
from hal_core.memory.views import ByteRange
from hal_core.memory.writes import Writes
from hal_core.output.sinks import MemorySink, Sink
from hal_core.runtime.bound import bind
from hal_core.slots.fields import StateConfig
from hal_core.slots.state import SlotState
from hal_core.slots.step import Step
from msgspec.structs import replace

SIZES = StateConfig(num_slots=4, max_model_len=32)


@pytest.fixture
def bound():
    with bind(CpuPlugin.open(0, {})) as device:
        yield device


def prefill(state, slot=0, **more):
    return Task(
        TaskKind.PREFILL, slot, admit(Request("r", [1, 2]), state.layout), num_scheduled_tokens=2, blocks=[0], **more
    )


def check_refused(bound, hook, argument, arguments):
    """The error names the caller, the fault and the cure (G26); memory and the host table are unchanged."""
    state = arguments.get("state")
    held = state.memory.buffer.copy() if isinstance(state, SlotState) else None
    with pytest.raises(InvalidValue) as raised:
        getattr(bound, hook)(**arguments)
    error = raised.value
    assert (error.device, error.hook, error.argument) == ("cpu:0", hook, argument)
    assert error.cure
    if held is not None:
        assert (state.memory.buffer == held).all()
        assert not state.host_table.preempted
        assert state.updates == 0


HOOK_ARGUMENTS = {
    "insert_tasks": ("state", "tasks"),
    "broadcast_tokens": ("state", "group"),
    "save_output": ("state", "step", "sink"),
    "update_inputs": ("state", "step"),
    "async_set_value": ("target", "value"),
}


def sound(bound, hook):
    """Arguments with which the hook would do work."""
    state = bound.state(SIZES)
    every = {"state": state, "tasks": [prefill(state)], "group": Group((0, 1), 0), "step": Step(0, {"target": [0]})}
    every |= {"sink": MemorySink(), "target": state.view("step_idx"), "value": 1}
    return {name: every[name] for name in HOOK_ARGUMENTS[hook]} | {"stream": bound.default_stream}


@pytest.mark.parametrize("hook", HOOK_ARGUMENTS)
@pytest.mark.parametrize("stream", [None, 0, 7, "stream", SyncStream])
def test_g26_what_is_no_stream_is_refused_on_every_device(bound, hook, stream):
    check_refused(bound, hook, "stream", sound(bound, hook) | {"stream": stream})


@pytest.mark.parametrize(
    ("hook", "argument"),
    [(hook, name) for hook, names in HOOK_ARGUMENTS.items() for name in names if name not in ("tasks", "value")],
)
@pytest.mark.parametrize("wrong", [None, "a word", 5, [1]])
def test_g26_an_argument_of_another_kind_is_refused_before_any_work(bound, hook, argument, wrong):
    check_refused(bound, hook, argument, sound(bound, hook) | {argument: wrong})


def test_g26_tasks_that_are_none_are_refused(bound):
    state = bound.state(SIZES)
    task = prefill(state)
    for tasks in (None, task, 5, [1], [task, None], "ab", {1: 2}, iter([task])):
        check_refused(bound, "insert_tasks", "tasks", sound(bound, "insert_tasks") | {"state": state, "tasks": tasks})
    for name in ("blocks", "drafts"):
        for value in (None, 5):
            tasks = [replace(task, **{name: value})]
            check_refused(
                bound, "insert_tasks", "tasks", {"state": state, "tasks": tasks, "stream": bound.default_stream}
            )
    with pytest.raises(InvalidValue, match=r"request .*admit\(\) the request first"):
        TaskBatch.prefill([0], [Request("r", [1])], [1], [[0]])


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        *[("memory", wrong) for wrong in (None, "state", 5, SlotState)],
        *[("parts", wrong) for wrong in (None, 5, ByteRange(0, 4), "ab", [(0, 4)], [ByteRange(0, 4), None], [0, 4])],
        *[("parts", wrong) for wrong in ([ByteRange("0", 4)], [ByteRange(0, None)], [ByteRange(0.0, 4.0)])],
        pytest.param("parts", iter([ByteRange(0, 4)]), id="parts-an iterator"),
    ],
    ids=repr,
)
def test_g26_a_copy_out_of_what_is_no_memory_or_no_ranges_is_refused(bound, argument, wrong):
    arguments = {"memory": bound.state(SIZES).memory, "parts": [ByteRange(0, 4)], "stream": bound.default_stream}
    check_refused(bound, "copy_out", argument, arguments | {argument: wrong})


def test_g26_a_state_is_not_its_memory_and_bounds_are_not_a_range(bound):
    state, stream = bound.state(SIZES), bound.default_stream
    view = state.view("seed")
    for argument, wrong in (("memory", state), ("memory", view), ("parts", [view.bounds()])):
        arguments = {"memory": state.memory, "parts": [ByteRange(0, 4)], "stream": stream}
        check_refused(bound, "copy_out", argument, arguments | {argument: wrong})
    first, end = view.bounds()
    copied = bound.copy_out(memory=state.memory, parts=(ByteRange(first, end - first),), stream=stream)
    copied.wait()
    assert copied.data[0].nbytes == end - first == 8 * SIZES.num_slots


def test_g26_copies_out_of_what_is_no_memory_of_the_device_order_nothing(bound):
    state, stream = bound.state(SIZES), bound.default_stream
    with bind(CpuPlugin.open(0, {})) as other:
        for wrong in (state, None, b"x" * 8, other.state(SIZES).memory):
            check_refused(bound, "order_after_reads", "memory", {"memory": wrong, "stream": stream})
    assert bound.order_after_reads(memory=state.memory, stream=stream) is None


class OfAFramework(CpuDevice):
    """A device that takes a framework's stream as its own, and keeps what it orders."""

    ordered = ()

    def foreign_stream(self, stream):
        return self.default_stream

    def order_after_reads(self, stream, memory=None):
        self.ordered = (stream, memory)


def test_a_frameworks_stream_is_ordered_after_reads_of_the_given_memory():
    with bind(OfAFramework(0, {})) as bound:
        memory = bound.state(SIZES).memory
        bound.order_after_reads(memory=memory, stream=object())
        assert bound.device.ordered == (bound.default_stream, memory)


@pytest.mark.parametrize("wrong", [None, [1], 5, "writes", Writes], ids=repr)
def test_g26_writes_that_are_none_are_refused(bound, wrong):
    check_refused(bound, "write", "writes", {"writes": wrong, "stream": bound.default_stream})


def test_g18_what_left_is_still_to_be_reported_after_a_sink_that_is_none(bound):
    state, stream = bound.state(SIZES), bound.default_stream
    task, saved = prefill(state), state.drafts.saved
    bound.insert_tasks(state=state, tasks=[task], stream=stream)
    bound.insert_tasks(state=state, tasks=[Task(TaskKind.PREEMPTED, 0, task.request)], stream=stream)
    for sink in (None, MemorySink, Sink):  # a class has a put, but is no object to put into
        with pytest.raises(InvalidValue, match="not a sink") as raised:
            bound.save_output(state=state, step=Step(0, {"target": [0]}), sink=sink, stream=stream)
        assert (raised.value.argument, raised.value.device) == ("sink", "cpu:0")
        assert list(state.host_table.preempted) == [0]
    assert state.drafts.saved == saved


def test_g17_a_rank_that_does_not_send_needs_no_sink(bound):
    step = Step(0, {"target": [0]}, group=Group((0, 1), 1))
    bound.save_output(state=bound.state(SIZES), step=step, sink=None, stream=bound.default_stream).wait()


def test_an_error_inside_a_plugin_is_not_blamed_on_sound_arguments():
    def stumble(self, device, state, tasks, stream):
        return None.missing

    bound = bind(type("Stumbling", (CpuDevice,), {"insert_tasks": hookimpl(stumble)})(0, {}))
    with pytest.raises(AttributeError, match="missing"):
        bound.insert_tasks(**sound(bound, "insert_tasks"))


@pytest.mark.parametrize(
    "sizes",
    [
        *(None, 4, (4, 32)),
        *(StateConfig(num_slots=2**31 - 1, max_model_len=2**31 - 1), StateConfig(num_slots=10**7, max_model_len=10**8)),
        StateConfig(num_slots=1, max_model_len=8, max_eos=2**30),
    ],
)
def test_g26_impossible_sizes_are_refused_before_allocation(bound, sizes):
    check_refused(bound, "state", "sizes", {"sizes": sizes})
    assert bound.counters().allocations == 0


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_state_has_a_name(bound, name):
    check_refused(bound, "state", "name", {"sizes": SIZES, "name": name})


def test_sizes_are_int32():
    with pytest.raises(InvalidValue, match="slots") as raised:
        StateConfig(num_slots=2**31, max_model_len=8)
    assert raised.value.argument == "sizes"


def test_g26_memory_that_is_not_there_names_the_sizes():
    def allocate(self, nbytes):
        raise MemoryError("Unable to allocate")

    bound = bind(type("Full", (CpuDevice,), {"allocate": allocate})(0, {}))
    with pytest.raises(OutOfMemory, match="Unable to allocate") as raised:
        bound.state(SIZES)
    assert str(raised.value).startswith("cpu:0: state: sizes: ")
    assert raised.value.cure
