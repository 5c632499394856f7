"""Framework tensors that shape and strides do not describe: resolved, or refused by name (G6)."""

from types import SimpleNamespace

import numpy as np
import pytest
from hal_core.devices.cpu import CpuPlugin
from hal_core.errors import HalError, InvalidValue
from hal_core.memory.foreign_tensors import check_resolved
from hal_core.runtime.bound import bind

RESOLVED = {
    "negative bit": lambda torch: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conjugate and negative": lambda torch: torch.tensor([1 + 2j, 3 - 4j]).conj().resolve_neg().imag,
    "gradient": lambda torch: torch.ones(2, requires_grad=True) * 3,
    "parameter": lambda torch: torch.nn.Parameter(torch.tensor([5.0, 6.0])),
    "expanded": lambda torch: torch.ones(1).expand(2),
    "turned": lambda torch: torch.arange(6.0).reshape(3, 2).T[0, :2],
    "bfloat16": lambda torch: torch.tensor([1.5, -2.0]).bfloat16(),
    "bfloat16, negative bit": lambda torch: torch._neg_view(torch.tensor([1.5, -2.0]).bfloat16()),
}
REFUSED = {
    "sparse": (lambda torch: torch.eye(2).to_sparse(), "layout sparse_coo"),
    "sparse rows": (lambda torch: torch.eye(2).to_sparse_csr(), "layout sparse_csr"),
    "nested": (lambda torch: torch.nested.nested_tensor([torch.ones(1), torch.ones(1)]), "nested"),
    "quantized": (lambda torch: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
    "without memory": (lambda torch: torch.ones(2, device="meta"), "is on meta"),
    "zeros without memory": (lambda torch: torch._efficientzerotensor(2), "has no memory"),
    "mkldnn": (lambda torch: torch.ones(2).to_mkldnn(), "layout _mkldnn"),
    "float8": (lambda torch: torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "complex": (lambda torch: torch.tensor([1j, 2j]), "complex64"),
}


@pytest.fixture(scope="module")
def bound():
    device = bind(CpuPlugin.open(0, {}))
    yield device
    device.close()


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed: pip install torch")


def write(bound, value, target=None):
    target = np.full(2, -9.0, np.float32) if target is None else target
    bound.async_set_value(target=target, value=value, stream=bound.default_stream).wait()
    return target


@pytest.mark.parametrize("kind", RESOLVED)
def test_g06_a_lazy_tensor_of_torch_on_the_host_is_resolved(bound, torch, kind):
    value = RESOLVED[kind](torch)
    assert write(bound, value).tolist() == value.detach().float().tolist()


@pytest.mark.filterwarnings("ignore")  # torch warns about features that it calls beta or deprecated
@pytest.mark.parametrize("kind", REFUSED)
def test_g06_what_is_no_array_of_torch_is_refused_by_name(bound, torch, kind):
    make, name = REFUSED[kind]
    with pytest.raises(HalError, match=name) as raised:
        write(bound, make(torch))
    assert raised.value.cure


@pytest.mark.parametrize("role", ["value", "target"])
def test_g06_paddles_sparse_tensors_are_refused_and_not_read(bound, role):
    paddle = pytest.importorskip("paddle", reason="paddle is not installed: pip install paddlepaddle")
    sparse = paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    given = (sparse, None) if role == "value" else (np.zeros((2, 2), np.float32), sparse)
    with pytest.raises(InvalidValue, match=f"{role}: the tensor is sparse"):
        write(bound, *given)


def test_a_tensor_of_paddle_without_memory_is_no_target(bound):
    paddle = pytest.importorskip("paddle", reason="paddle is not installed: pip install paddlepaddle")
    tensor = paddle.ones([2])
    tensor._clear_data()
    with pytest.raises(InvalidValue, match="without memory"):
        write(bound, 1.0, tensor)


TARGETS = {
    "whole": lambda torch: torch.zeros(2, 3),
    "a column": lambda torch: torch.zeros(2, 3)[:, 1],
    "turned": lambda torch: torch.zeros(2, 3).T,
    "bool": lambda torch: torch.zeros(4, dtype=torch.bool),
    "bfloat16": lambda torch: torch.zeros(4, dtype=torch.bfloat16),
    "int64 scalar": lambda torch: torch.zeros((), dtype=torch.int64),
    "empty": lambda torch: torch.zeros(0, 3),
    "parameter": lambda torch: torch.nn.Parameter(torch.zeros(2)),
}
NO_TARGETS = {
    "negative bit": (lambda torch: torch.tensor([1 + 2j]).conj().imag, "neg bit"),
    "without memory": (lambda torch: torch.ones(2, device="meta"), "is on meta, not on the host"),
    "zeros without memory": (lambda torch: torch._efficientzerotensor(2), "has no memory"),
    "sparse": (lambda torch: torch.eye(2).to_sparse(), "layout sparse_coo"),
    "expanded": (lambda torch: torch.zeros(1).expand(2), "overlap"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_tensor_of_torch_on_the_host_is_written_in_place(bound, torch, kind):
    target = TARGETS[kind](torch)
    address = target.data_ptr()
    write(bound, 1, target)
    assert target.data_ptr() == address
    assert target.detach().float().flatten().tolist() == [1.0] * target.numel()


def test_a_view_of_a_tensor_of_torch_leaves_the_rest_alone(bound, torch):
    tensor = torch.zeros(3, 4)
    write(bound, [[1.0, 2.0], [3.0, 4.0]], tensor[1:, ::2])
    assert tensor.tolist() == [[0] * 4, [1, 0, 2, 0], [3, 0, 4, 0]]


@pytest.mark.filterwarnings("ignore")  # torch warns about features that it calls beta
@pytest.mark.parametrize("kind", NO_TARGETS)
def test_a_tensor_of_torch_that_no_view_describes_is_no_target(bound, torch, kind):
    make, name = NO_TARGETS[kind]
    with pytest.raises(InvalidValue, match=name):
        write(bound, 1.0, make(torch))


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "bfloat16"])
def test_a_tensor_of_paddle_on_the_host_is_written_in_place(bound, dtype):
    paddle = pytest.importorskip("paddle", reason="paddle is not installed: pip install paddlepaddle")
    target = paddle.zeros([3, 4], dtype)
    write(bound, 1, target[1, ::2])
    assert target.astype("float32").tolist() == [[0] * 4, [1, 0, 1, 0], [0] * 4]


def test_what_is_no_tensor_is_no_target(bound):
    with pytest.raises(InvalidValue, match="bytearray is not a tensor of this device"):
        write(bound, 1.0, bytearray(4))


@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_g06_memory_that_holds_other_values_is_refused_on_a_device(bit):
    methods = {"is_neg": lambda: bit == "neg", "is_conj": lambda: bit == "conj"}
    lazy = SimpleNamespace(is_nested=False, layout="torch.strided", is_quantized=False, **methods)
    with pytest.raises(InvalidValue, match=f"value: the tensor is lazy: torch's {bit} bit is set .*resolve_{bit}"):
        check_resolved(lazy, "value")
