"""The sim device beside Paddle on the accelerator; prints its answer as JSON. ``python paddle_device.py NAME``."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from hal_sim import paddle_env

paddle_env.announce(mode=2)

import paddle  # noqa: E402 (it must be told of the device first)
from hal_core.errors import HalError  # noqa: E402
from hal_core.runtime.bound import bind  # noqa: E402
from hal_sim import SimPlugin  # noqa: E402

PLACE = paddle.CustomPlace(paddle_env.DEFAULT_NAME, 0)


def refusal(call: Any) -> str:
    try:
        call()
    except HalError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def tensors() -> Any:
    """Values written by the hook, read by Paddle; Paddle's values, read by the hook; views; refusals."""
    with bind(SimPlugin.open(0, {})) as device:
        stream = device.default_stream
        tensor = paddle.to_tensor(np.arange(24, dtype=np.int64).reshape(4, 6), place=PLACE)
        address = device.device.resolve(tensor).memory.address
        device.async_set_value(target=tensor[1:3, 2:4], value=[[1, 2], [3, 4]], stream=stream)
        device.async_set_value(target=tensor[3], value=tensor[0], stream=stream)
        half = paddle.to_tensor(np.zeros(3, np.float32), place=PLACE).astype("bfloat16")
        device.async_set_value(target=half, value=[1.0, 2.5, -3.0], stream=stream)
        same_stream = stream.handle == paddle_env.current_stream().handle

        def set_value(target: Any, value: Any) -> Any:
            return lambda: device.async_set_value(target=target, value=value, stream=stream)

        elsewhere = paddle.to_tensor([1], place=paddle.CustomPlace(paddle_env.DEFAULT_NAME, 1))
        other = paddle.to_tensor(np.zeros(1, np.int64), place=PLACE)
        answer = {
            "tensor": tensor.numpy().tolist(),
            "half": half.astype("float32").numpy().tolist(),
            "same memory": address == tensor.data_ptr(),
            "same stream": same_stream,
            "cpu tensor": refusal(set_value(paddle.to_tensor([1], place=paddle.CPUPlace()), 1)),
            "other device": refusal(set_value(elsewhere, 1)),
            "value of other device": refusal(set_value(other, elsewhere)),
            "host value": refusal(set_value(other, paddle.to_tensor([7], place=paddle.CPUPlace()))),
        }
        stream.synchronize()
        answer["races"] = [str(race) for race in device.device.races()]
        return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]]()) + "\n")
