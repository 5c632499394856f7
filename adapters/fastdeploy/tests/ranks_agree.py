"""Functions that two ranks run in the tests of an agreement."""

import numpy as np
import paddle
from hal_core.devices.cpu import CpuPlugin
from hal_core.runtime.bound import bind
from hal_fastdeploy.agreeing import Agreement


class Inputs:
    """Attributes with dict-style access, as an InputBatch has."""

    def __init__(self, tensors):
        vars(self).update(tensors)

    def __getitem__(self, name):
        return getattr(self, name)

    def __setitem__(self, name, value):
        setattr(self, name, value)


class Counted:
    """A communicator that counts its collectives."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def broadcast(self, *given):
        self.calls += 1
        return self.inner.broadcast(*given)


def agree(rank, moved):
    """Sample on each rank separately, and agree, in place; return the values of the runner and its proposer."""
    draw = np.random.default_rng(rank.rank)
    share = {
        "accept_tokens": paddle.to_tensor(draw.integers(0, 1000, (3, 4))),
        "accept_num": paddle.to_tensor(draw.integers(0, 4, 3).astype(np.int32)),
        "step_idx": paddle.to_tensor(draw.integers(0, 9, (3, 1))),
        "stop_flags": paddle.to_tensor(draw.integers(0, 2, (3, 1)).astype(np.bool_)),
        "next_tokens": paddle.to_tensor(draw.integers(0, 1000, (3, 1))),
    }
    proposer = {"accept_tokens": share["accept_tokens"], "step_idx": paddle.to_tensor(draw.integers(0, 9, (3, 1)))}
    own = {name: tensor.tolist() for name, tensor in share.items()}
    with bind(CpuPlugin.open(0, {})) as device:
        inputs = Inputs(share)
        agreement = Agreement(device, [inputs, proposer], tensor_parallel_size=2, rank=rank.rank)
        share = vars(inputs)
        assert {name: tensor.tolist() for name, tensor in share.items()} == own, "moving changes no value"
        counted = Counted(device.device.communicator(agreement.group))
        device.device.communicator = lambda group: counted
        if moved:
            agreement().wait()
        after = {name: tensor.tolist() for name, tensor in share.items()}
        shared = proposer["accept_tokens"].tolist() == after["accept_tokens"]
        return own, after, shared, proposer["step_idx"].tolist() == after["step_idx"], counted.calls
