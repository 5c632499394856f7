"""The broadcast after sampling: two ranks agree on four tensors at once (pull requests 7096, 7172)."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from hal_fastdeploy.agreeing import NAMES, Agreement

import hal
from tests.ranks import ForkedRanks

pytest.importorskip("paddle")


@pytest.fixture(scope="module")
def pair():
    with ForkedRanks(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def work():
    spec = importlib.util.spec_from_file_location("hal_ranks_agree", Path(__file__).with_name("ranks_agree.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ranks_that_sampled_apart_hold_the_first_ranks_tokens(pair, work):
    (first, _, *_), (own, after, shared, cloned, calls) = pair.run(work.agree, True).values()
    assert own["accept_tokens"] != first["accept_tokens"], "each rank draws its own"
    assert {name: after[name] for name in NAMES} == {name: first[name] for name in NAMES}
    assert after["next_tokens"] == own["next_tokens"], "what upstream does not send stays"
    assert (shared, cloned, calls) == (True, False, 1)


def test_without_the_broadcast_ranks_go_on_with_their_own_tokens(pair, work):
    (first, *_), (own, after, *_) = pair.run(work.agree, False).values()
    assert after == own != first


def test_g26_a_rank_outside_its_group_is_refused():
    with hal.open_device("cpu") as device, pytest.raises(InvalidValue, match="rank: rank 2 of 2"):
        Agreement(device, [{}], tensor_parallel_size=2, rank=2)


def test_a_tensor_that_was_replaced_since_is_named():
    """Waking up makes tensors anew: the block would be broadcast, and the runner compute with others."""
    with hal.open_device("cpu") as device:
        batch = {
            name: View.contiguous(device.device.allocate(64), 0, (4, 1), dtype_of(dtype))
            for name, dtype in zip(NAMES, ("int64", "int32", "int64", "bool"), strict=True)
        }
        agreement = Agreement(device, [batch], tensor_parallel_size=1, rank=0)
        batch["step_idx"] = View.contiguous(device.device.allocate(64), 0, (4, 1), dtype_of("int64"))
        with pytest.raises(InvalidValue, match="batches: step_idx: replaced since the block was made"):
            agreement()
