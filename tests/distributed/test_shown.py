"""What names cards goes past Paddle's launcher to the ranks, if its Paddle cannot use them."""

import pytest

from hal.distributed.shown import CUDA, XPU, give_back, keep

ALL = dict.fromkeys(CUDA + XPU, "0,1")


@pytest.mark.parametrize(
    ("cuda", "xpu", "left"), [(False, False, set()), (True, False, set(CUDA)), (False, True, set(CUDA + XPU))]
)
def test_a_launcher_sees_what_its_paddle_can_use_and_the_ranks_all(cuda, xpu, left):
    environment = ALL | {"OTHER": "1"}
    keep(environment, cuda=cuda, xpu=xpu)
    assert {name for name in ALL if name in environment} == left
    give_back(environment)
    assert environment == ALL | {"OTHER": "1"}


def test_what_was_not_set_is_not_set_afterwards():
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    keep(environment, cuda=False, xpu=False)
    assert "CUDA_VISIBLE_DEVICES" not in environment
    give_back(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}
