"""Tensors over a state's fields: they are the state's own memory, for as long as one of them is referenced."""

import gc

import numpy as np
import pytest
from hal_core import Request, StateConfig, Task, TaskKind
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import DeviceClosed, InvalidValue, Unavailable
from hal_core.memory import dlpack
from hal_core.memory.dtypes import DTYPES
from hal_core.memory.views import View
from hal_core.runtime.bound import bind

SIZES = StateConfig(num_slots=512, max_model_len=300, block_size=4, max_draft_tokens=2, max_logprobs=2)
PLAIN = [one for one in DTYPES if one.name != "bfloat16"]


@pytest.fixture
def bound():
    with bind(CpuPlugin.open(0, {})) as device:
        yield device


def insert(bound, state, slot, tokens):
    task = Task(TaskKind.PREFILL, slot, state.admit(Request(f"r{slot}", tokens)), 0, len(tokens), range(slot, slot + 9))
    bound.insert_tasks(state=state, tasks=[task], stream=bound.default_stream)


@pytest.mark.parametrize("framework", ["numpy", "paddle"])
def test_a_tensor_of_each_field_is_its_memory(bound, framework):
    """A tensor shows the hooks' writes without a call, and hooks read the values written into it."""
    if framework == "paddle":
        pytest.importorskip("paddle")
    state = bound.state(SIZES)
    tensors = {name: state.tensor(name, framework) for name in state.layout.fields}
    for name, tensor in tensors.items():
        view = state.view(name)
        assert tuple(tensor.shape) == view.shape, name
        address = tensor.ctypes.data if framework == "numpy" else tensor.data_ptr()
        assert 0 in view.shape or address == state.memory.address + view.offset, name
    insert(bound, state, 511, [7, 8, 9])
    read = np.asarray if framework == "numpy" else lambda tensor: tensor.numpy()
    assert read(tensors["block_tables"])[511, :9].tolist() == list(range(511, 520))
    assert read(tensors["token_ids"])[511, :3].tolist() == [7, 8, 9]
    tensors["accept_tokens"][511, 1] = 12345
    bound.async_set_value(target=state.view("accept_tokens")[510, 0], value=6, stream=bound.default_stream)
    assert read(state.tensor("accept_tokens", framework))[510:, :2].tolist()[0][0] == 6
    assert int(tensors["accept_tokens"][511, 1]) == 12345


def test_the_framework_is_the_one_that_is_imported(bound):
    paddle = pytest.importorskip("paddle")
    assert isinstance(bound.state(SIZES).tensor("step_idx"), paddle.Tensor)


@pytest.mark.parametrize("dtype", PLAIN, ids=lambda one: one.name)
def test_a_view_of_any_type_and_strides_goes_by_dlpack(bound, dtype):
    array = np.arange(6 * 8).reshape(6, 8).astype(dtype.storage)
    view = bound.device.resolve(array)[1:6:2, ::-3]
    taken = np.from_dlpack(view)
    assert (taken.dtype, taken.tolist()) == (dtype.storage, array[1:6:2, ::-3].tolist())
    taken[1, 1] = 0
    assert array[3, 4] == 0


def test_strides_of_no_whole_elements_are_refused(bound):
    """DLPack counts strides in elements: elements 5 bytes apart were described as 4 apart, and wrong numbers were
    read.
    """
    array = np.zeros(4, [("a", np.int8), ("b", np.int32)])
    array["b"] = [1, 2, 3, 4]
    view = bound.device.resolve(array["b"])
    with pytest.raises(BufferError, match="no multiples of the element size"):
        np.from_dlpack(view)
    assert np.from_dlpack(view[2:3]).tolist() == [3], "of one element nobody asks for a stride"


def test_bfloat16_has_its_own_code():
    codes = {one.name: dlpack.code_of(one) for one in DTYPES}
    assert (codes["bfloat16"], codes["bool"], codes["uint8"], codes["int64"], codes["float32"]) == (4, 6, 1, 0, 2)


def test_a_tensor_outlives_its_state_and_its_device():
    device = bind(CpuPlugin.open(0, {}))
    state = device.state(SIZES)
    insert(device, state, 3, [4, 5])
    tensor, before = state.tensor("token_ids", "numpy"), len(dlpack._out)
    device.close()
    with pytest.raises(DeviceClosed, match="the device is closed"):
        state.tensor("token_ids", "numpy")
    view = state.view("token_ids")
    with pytest.raises(DeviceClosed):
        np.from_dlpack(view)
    del state, device, view
    gc.collect()
    others = [np.zeros(tensor.nbytes, np.uint8) + 255 for _ in range(8)]  # would be at the freed state's address
    assert tensor[3, :2].tolist() == [4, 5]
    assert others
    del tensor
    gc.collect()
    assert len(dlpack._out) == before - 1


def test_a_capsule_that_nobody_takes_keeps_nothing(bound):
    gc.collect()
    state, before = bound.state(SIZES), len(dlpack._out)
    for _ in range(100):
        state.view("step_idx").__dlpack__()
        state.view("step_idx").__dlpack__(max_version=(1, 1))
    gc.collect()
    assert len(dlpack._out) == before


def test_what_cannot_be_is_refused_by_name(bound):
    state = bound.state(SIZES)
    with pytest.raises(InvalidValue, match="no_such_field"):
        state.tensor("no_such_field")
    with pytest.raises(InvalidValue, match="'jax' is not a framework") as raised:
        state.tensor("step_idx", "jax")
    assert "paddle, torch, cupy, numpy" in raised.value.cure
    with pytest.raises(Unavailable, match=r"cpu:0.*cupy cannot make a tensor"):
        state.tensor("step_idx", "cupy")
    view = state.view("step_idx")
    with pytest.raises(BufferError, match="not as a copy"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="not as a copy"):
        view.__dlpack__(dl_device=(2, 0))
    assert not hasattr(view, "__cuda_array_interface__")


def test_a_reversed_view_has_no_tensor_of_paddle(bound):
    view = View.contiguous(bound.device.allocate(64), 0, (8,), PLAIN[0])[::-1]
    pytest.importorskip("paddle")
    with pytest.raises(InvalidValue, match=r"cpu:0.*paddle has no reversed axes"):
        bound.device.tensor(view, "paddle")
    assert bound.device.tensor(view, "numpy").strides == view.strides


def test_memory_whose_addresses_mean_nothing_has_no_tensors(bound):
    class Elsewhere:
        name, index, dlpack_device = "chip", 1, None

    class Memory:
        device, address, nbytes = Elsewhere(), 0, 64

    view = View.contiguous(Memory(), 0, (8,), PLAIN[0])
    with pytest.raises(BufferError, match="chip:1 has no memory"):
        np.from_dlpack(view)
    from hal_core.devices import tensor_over

    with pytest.raises(Unavailable, match=r"chip:1.*frameworks cannot use the addresses"):
        tensor_over(view)
