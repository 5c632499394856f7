"""The sim device writes Paddle's tensors on the accelerator where they are, on Paddle's stream."""

import pytest
from hal_sim import NoPaddle
from hal_sim.build import paddle_device


@pytest.fixture(scope="module", autouse=True)
def paddle_library(built):
    try:
        paddle_device()
    except NoPaddle as error:
        pytest.skip(str(error))


def test_paddle_s_tensors_are_written_where_they_are(probe):
    found = probe("paddle_device.py", "tensors", environment={"FLAGS_free_idle_chunk": "1"})
    assert found["tensor"] == [
        [0, 1, 2, 3, 4, 5], [6, 7, 1, 2, 10, 11], [12, 13, 3, 4, 16, 17], [0, 1, 2, 3, 4, 5]
    ]  # fmt: skip
    assert found["half"] == [1.0, 2.5, -3.0]
    assert found["same memory"]
    assert found["same stream"]
    assert found["races"] == []
    assert "is on Place(cpu), not on device 0" in found["cpu tensor"]
    assert "hal_sim:1" in found["other device"]
    assert "open the device that holds it" in found["other device"]
    assert "InvalidValue: sim:0: async_set_value: " in found["value of other device"]
    assert found["host value"] == "no error"
