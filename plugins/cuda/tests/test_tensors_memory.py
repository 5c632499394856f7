"""Memory of tensors: kept until the work on it is done (G2), refused if it does not hold the elements (G6)."""

import gc
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hal_core import ByteRange, InvalidValue, StateConfig

SIZES = StateConfig(num_slots=8, max_model_len=64, block_size=4)


class Tensor:
    """A tensor of a framework, over memory of its own."""

    def __init__(self, bound, values):
        self.memory = bound.device.allocate(values.nbytes)
        bound.device.upload(self.memory.address, values.reshape(-1).view(np.uint8), bound.device.upload_stream).wait(10)
        self.shape, self.kind = values.shape, values.dtype.str

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.kind, "data": (self.memory.address, False)}


@contextmanager
def held(device, stream):
    """Hold a stream of the stand-in."""
    hold = device.device.driver.api.library.stand_in_hold
    hold(stream.handle, 1)
    try:
        yield
    finally:
        hold(stream.handle, 0)


@pytest.mark.parametrize("which", ["value", "target"])
def test_g02_a_dropped_tensor_lives_until_its_work_is_over(opened, which):
    device = opened()
    state, stream = device.state(SIZES), device.device.stream()
    target = state.view("temperature")
    tensor = Tensor(device, np.arange(8, dtype=np.float32).reshape(target.shape))
    alive = weakref.ref(tensor)
    with held(device, stream):
        given = (target, tensor) if which == "value" else (tensor, 3.5)
        device.async_set_value(target=given[0], value=given[1], stream=stream)
        del tensor, given
        gc.collect()
        assert alive() is not None, "the framework may give its memory to another tensor"
    device.copy_out(memory=state.memory, parts=[ByteRange(0, 8)], stream=device.default_stream).wait(10)
    assert alive() is None, "a copy out finds what is over"


def test_tensors_under_way_are_looked_at_a_few_at_a_time(opened, monkeypatch):
    device = opened()
    stream, retired, looks = device.device.stream(), device.device.retired, []
    query = device.device.events.query
    with held(device, stream):
        for _ in range(100):
            device.async_set_value(target=Tensor(device, np.zeros(2, np.float32)), value=1.0, stream=stream)
        assert len(retired._waiting) >= 100
        monkeypatch.setattr(device.device.events, "query", lambda event: looks.append(event) or query(event))
        retired.look()
        assert len(looks) <= 4
    for _ in range(200):
        retired.look()
    assert not retired._waiting, "everything is over"


class Lazy(Tensor):
    """Like a tensor of torch on the GPU whose memory holds the negative of its elements (``z.conj().imag``)."""

    is_cuda, is_nested, is_quantized, layout = True, False, False, "torch.strided"
    device = SimpleNamespace(index=0)

    def is_neg(self):
        return True


@pytest.mark.parametrize("role", ["value", "target"])
def test_g06_a_lazy_tensor_on_the_device_is_refused_by_name(opened, role):
    device = opened()
    state = device.state(SIZES)
    lazy, target = Lazy(device, np.ones(8, np.float32)), state.view("temperature")
    given = (target, lazy) if role == "value" else (lazy, 3.5)
    with pytest.raises(InvalidValue, match=f"{role}: the tensor is lazy: torch's neg bit is set .*resolve_neg"):
        device.async_set_value(target=given[0], value=given[1], stream=device.default_stream)
