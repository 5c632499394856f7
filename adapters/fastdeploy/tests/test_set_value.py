"""``async_set_value(tgt, src)`` with FastDeploy's conversions."""

import numpy as np
import pytest
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_fastdeploy.values import SetValue

import hal


@pytest.fixture(params=["cpu", "sim"])
def device(request):
    if request.param == "sim":
        pytest.importorskip("hal_sim", reason="paddle-hal-sim is not installed: pip install ./plugins/sim")
    with hal.open_device(request.param) as bound:
        yield bound


def tensor(device, shape, dtype):
    kind = dtype_of(dtype)
    return View.contiguous(device.device.allocate(int(np.prod(shape)) * kind.itemsize), 0, shape, kind)


def read(device, view):
    part = ByteRange(0, view.size * view.dtype.itemsize)
    copied = device.copy_out(memory=view.memory, parts=[part], stream=device.default_stream)
    copied.wait()
    return copied.data[0].view(view.dtype.storage).reshape(view.shape).tolist()


@pytest.mark.parametrize(
    ("dtype", "src", "should"),
    [
        ("int64", 1.75, [[1, 1], [1, 1]]),
        ("int64", -1.75, [[-1, -1], [-1, -1]]),
        ("int64", True, [[1, 1], [1, 1]]),
        ("int64", 2**53 + 1, [[2**53 + 1] * 2] * 2),
        ("float32", 3, [[3.0, 3.0], [3.0, 3.0]]),
        ("bool", 2, [[True, True], [True, True]]),
        ("int64", [1, 2**53 + 1, 3, 2**63 - 1], [[1, 2**53 + 1], [3, 2**63 - 1]]),
        ("int32", [1.9, -1.9, 0.5, 4], [[1, -1], [0, 4]]),
        ("int32", np.array([1.9, 2.0, 3.0, 4.0]), [[1, 2], [3, 4]]),
        ("int64", np.array([[1, 2], [3, 4]], np.int32), [[1, 2], [3, 4]]),
        ("float32", np.array([1, 2, 3, 4]), [[1.0, 2.0], [3.0, 4.0]]),
        ("bfloat16", 1.5, [[0x3FC0, 0x3FC0], [0x3FC0, 0x3FC0]]),
        ("bfloat16", [1.5, 1.0, 2.0, 0.0], [[0x3FC0, 0x3F80], [0x4000, 0]]),
    ],
    ids=str,
)
def test_a_value_becomes_what_upstreams_function_makes_of_it(device, dtype, src, should):
    target = tensor(device, (2, 2), dtype)
    SetValue(device)(target, src).wait()
    assert read(device, target) == should


@pytest.mark.parametrize(
    "src",
    [
        None,
        np.int64(3),
        (1, 2, 3, 4),
        "1",
        [1, 2, 3],
        [[1, 2], [3]],
        np.zeros(5),
        [1, 2, 3, 2**63],
        [1.0, 2.0, 3.0, np.inf],
    ],
    ids=str,
)
def test_g26_what_upstreams_function_refuses_is_a_value_error(device, src):
    target = tensor(device, (2, 2), "int64")
    SetValue(device)(target, 7).wait()
    with pytest.raises(ValueError, match=r"src|elements|homogeneous"):
        SetValue(device)(target, src)
    assert read(device, target) == [[7, 7], [7, 7]]


def test_a_tensor_is_cast_by_its_framework():
    paddle = pytest.importorskip("paddle")
    with hal.open_device("cpu") as device:
        target = paddle.zeros([2, 2], "int64")
        SetValue(device)(target, paddle.to_tensor([1.75, 2.0, 3.0, 4.0])).wait()
        SetValue(device)(target[0:1], [2**53 + 1, 9]).wait()
        assert target.tolist() == [[2**53 + 1, 9], [3, 4]]
