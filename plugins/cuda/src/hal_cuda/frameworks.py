"""The current stream of the framework in the process, without importing one."""

from __future__ import annotations

import sys


def current_stream(index: int) -> tuple[int, str]:
    """Return ``(handle, framework)`` of the stream on which the framework computes now; (0, "") if none is loaded.

    Paddle first, as hal's own worker uses it. Handle 0 is CUDA's default stream.
    """
    paddle = sys.modules.get("paddle")
    if paddle is not None and paddle.is_compiled_with_cuda():
        stream = paddle.device.cuda.current_stream(index)
        return int(stream.cuda_stream), "paddle"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_stream(index).cuda_stream), "torch"
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return int(cupy.cuda.get_current_stream().ptr), "cupy"
    return 0, ""
