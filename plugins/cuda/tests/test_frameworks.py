"""Frameworks' streams as arguments, and their tensors over a state."""

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import ByteRange, DeviceClosed, InvalidValue, MemorySink, Request, StateConfig, Step, Task, TaskKind
from hal_cuda.driver import CudaError

SIZES = StateConfig(num_slots=4, max_model_len=64, block_size=4)


class Torch:
    """Like torch.cuda.Stream and paddle.device.cuda.Stream: a handle, and methods with other names than hal's."""

    def __init__(self, handle):
        self.cuda_stream = handle

    def record_event(self): ...
    def wait_event(self, event): ...
    def synchronize(self): ...


class Protocol:
    """A stream in the form of cuda.core and CuPy."""

    def __init__(self, handle):
        self._handle = handle

    def __cuda_stream__(self):
        return (0, self._handle)


def test_a_worker_of_another_framework_needs_no_paddle(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", None)  # as if it were not installed
    bound = opened()
    state = bound.state(SIZES)
    task = Task(TaskKind.PREFILL, 1, state.admit(Request("r", [1] * 9)), 0, 9, [0, 1, 2])
    bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream).wait()


@pytest.mark.parametrize("kind", [Torch, Protocol])
def test_every_call_takes_a_frameworks_stream_as_one_of_the_device(opened, kind):
    bound = opened()
    state, made = bound.state(SIZES), bound.device.stream()
    stream, own = kind(made.handle), bound.device.stream_at(made.handle)
    before = bound.device.last.get(own.stream_key)
    bound.async_set_value(target=state.view("accept_num"), value=3, stream=stream).wait()
    task = Task(TaskKind.PREFILL, 1, state.admit(Request("r", [1] * 9)), 0, 9, [0, 1, 2])
    bound.insert_tasks(state=state, tasks=[task], stream=stream).wait()
    step = Step(0, {"target": np.array([1], np.int32)})
    record = state.take(bound.save_output(state=state, step=step, sink=MemorySink(), stream=stream))
    assert record.step == 0
    copied = bound.copy_out(memory=state.memory, parts=[ByteRange(0, 8)], stream=stream)
    copied.wait()
    assert bound.device.stream_at(made.handle) is own
    assert bound.device.last.get(own.stream_key) is not before, "the work went to another stream"


STRANGE = {
    "object": object(),
    "text": "0",
    "number": 7,
    "None": None,
    "True": True,
    "class": Torch,
    "handle that is none": SimpleNamespace(cuda_stream="?"),
}


@pytest.mark.parametrize("stream", STRANGE.values(), ids=STRANGE)
def test_what_is_no_stream_is_refused_by_name_and_nothing_is_written(opened, stream):
    bound = opened()
    state = bound.state(SIZES)
    with pytest.raises(InvalidValue, match=r"cuda:0: async_set_value: stream: .*is not a stream") as raised:
        bound.async_set_value(target=state.view("accept_num"), value=3, stream=stream)
    assert "a stream of a framework on this device" in raised.value.cure
    copied = bound.copy_out(memory=state.memory, parts=[ByteRange(state.view("accept_num").bounds()[0], 4)],
                            stream=bound.default_stream)  # fmt: skip
    copied.wait()
    assert not copied.data[0][:4].any()


@pytest.mark.parametrize("kind", [Torch, Protocol])
def test_a_device_opens_on_a_frameworks_stream(opened, kind):
    handle = opened().device.stream().handle
    assert opened({"stream": kind(handle)}).default_stream.handle == handle


@pytest.mark.parametrize("stream", [one for one in STRANGE.values() if one not in (7, None)] + [-1])
def test_a_device_does_not_open_on_what_is_no_stream(opened, stream):
    with pytest.raises(InvalidValue, match="cuda: options: stream = ") as raised:
        opened({"stream": stream})
    assert "a stream of a framework on this GPU" in raised.value.cure


def test_a_view_says_where_it_lies_to_others(opened):
    bound = opened()
    view = bound.state(SIZES).view("block_tables")
    spec = view.__cuda_array_interface__
    assert spec["data"] == (view.memory.address + view.offset, False)
    assert (spec["shape"], spec["typestr"], spec["strides"], spec["version"]) == (view.shape, "<i4", view.strides, 3)
    assert spec["stream"] == (bound.default_stream.handle or 1)
    assert view.__dlpack_device__() == (2, 0)
    assert "dltensor" in repr(view.__dlpack__(stream=-1))


def test_an_array_whose_strides_are_no_whole_elements_is_refused(opened):
    """Rounding such strides down once wrote to wrong bytes."""
    bound = opened()
    bound.device.driver.api.CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)

    class Array:
        __cuda_array_interface__ = {  # noqa: RUF012 (as in the libraries)
            "version": 3, "shape": (4,), "typestr": "<i4", "strides": (5,), "data": (0, False)
        }  # fmt: skip

    with pytest.raises(InvalidValue, match=r"target: strides of \(5,\) bytes are no whole elements of int32"):
        bound.async_set_value(target=Array(), value=1, stream=bound.default_stream)


class Held:
    """A framework's tensor over a view: it keeps the capsule until it no longer uses the memory."""

    def __init__(self, view):
        self.capsule = view.__dlpack__(stream=-1)


class Interface:
    """Like CuPy and torch with ``__cuda_array_interface__``: they keep the object that provided it."""

    def __init__(self, view):
        self.view, self.interface = view, view.__cuda_array_interface__


@pytest.mark.parametrize("taken", [Held, Interface])
def test_a_tensor_keeps_its_memory_when_state_and_device_are_gone(opened, taken):
    bound, freed = opened(), []
    api, view = bound.device.driver.api, bound.state(SIZES).view("token_ids")
    free = api.cuMemFreeAsync
    api.cuMemFreeAsync = lambda address, stream: freed.append(address) or free(address, stream)
    tensor, address = taken(view), view.memory.address
    bound.close()
    with pytest.raises(DeviceClosed, match="the device is closed"):
        view.__dlpack__()
    with pytest.raises(DeviceClosed, match="the device is closed"):
        _ = view.__cuda_array_interface__
    del bound, view
    gc.collect()
    assert address not in freed
    del tensor
    gc.collect()
    assert address in freed


def test_a_broken_device_gives_no_tensor_though_no_call_has_met_it(opened, monkeypatch):
    bound = opened()
    state, driver = bound.state(SIZES), bound.device.driver

    def broken(event):
        driver._raise(SimpleNamespace(name="CUDA_ERROR_MISALIGNED_ADDRESS"), "cuEventQuery")

    monkeypatch.setattr(bound.device.events, "query", broken)
    with pytest.raises(CudaError, match="MISALIGNED"):
        state.tensor("temperature", "numpy")
    with pytest.raises(DeviceClosed, match="spoilt by an earlier error"):
        state.tensor("temperature", "numpy")


def test_a_consumers_stream_waits_for_the_default_one(opened, monkeypatch):
    bound = opened()
    view, waited, other = bound.state(SIZES).view("block_tables"), [], bound.device.stream()
    monkeypatch.setattr(type(bound.default_stream), "wait", lambda stream, event: waited.append(stream.handle))
    view.__dlpack__(stream=other.handle)
    view.__dlpack__(stream=-1)
    view.__dlpack__(stream=bound.default_stream.handle or 1)
    assert waited == [other.handle]


def test_a_block_of_paddles_memory_waits_for_its_zeros(opened, monkeypatch):
    """Paddle copies them on CUDA's default stream, and returns before the copy is done."""
    paddle = pytest.importorskip("paddle")
    bound, order = opened(), []
    kept = np.zeros(16, np.int64)
    tensor = SimpleNamespace(data_ptr=lambda: kept.ctypes.data)
    monkeypatch.setattr("hal_cuda.device.current_stream", lambda index: (0, "paddle"))
    monkeypatch.setattr(paddle, "CUDAPlace", lambda index: index)
    monkeypatch.setattr(paddle, "to_tensor", lambda *_, **__: order.append("zeros") or tensor)
    runtime = bound.device._runtime
    record = runtime._record
    monkeypatch.setattr(runtime, "_record", lambda event, stream: order.append(stream) or record(event, stream))
    wait = runtime.event_synchronize
    monkeypatch.setattr(runtime, "event_synchronize", lambda *given: order.append("wait") or wait(*given))
    assert bound.device.allocate(64).keep is tensor
    assert order == ["zeros", 1, "wait"]
