"""In-place scatters of a place for elements of each width, tested when the device is opened.

Paddle registers its kernels by operator, place and type. If one is missing, it silently computes on the CPU instead. So
each candidate runs once with that fallback switched off, and must give the right bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .paddle_memory import PaddleMemory, Tensor, empty_words, host_tensor

FALLBACK = "FLAGS_enable_api_kernel_fallback"
Candidates = Mapping[int, Sequence[tuple[str, str]]]

COMMON: Candidates = {
    8: (("scatter_", "int64"),),
    4: (("scatter_", "int32"), ("scatter_", "float32")),
    2: (("scatter_", "int16"), ("scatter_", "float16"), ("index_put_", "int16")),
    1: (("scatter_", "uint8"), ("index_put_", "uint8")),
}
"""By element width, the operators (of ``paddle``) and types to try, best first. The type only moves bits."""


@dataclass(frozen=True, slots=True)
class Scatter:
    """One way to write elements of one width: ``put(tensor, indices, values)``, all viewed as ``dtype``."""

    operator: str
    dtype: str

    def put(self, tensor: Tensor, indices: Tensor, values: Tensor) -> None:
        """Write ``values[i]`` to ``tensor[indices[i]]`` in place."""
        import paddle

        if self.operator == "scatter_":
            paddle.scatter_(tensor, indices, values)
        else:
            paddle.index_put_(tensor, (indices,), values)


@contextmanager
def without_fallback() -> Iterator[None]:
    """Make a missing kernel raise instead of being computed on the CPU."""
    import paddle

    before = paddle.get_flags([FALLBACK])
    paddle.set_flags({FALLBACK: False})
    try:
        yield
    finally:
        paddle.set_flags(before)


def find(place: Any, candidates: Candidates, finish: Callable[[], None]) -> dict[int, Scatter]:  # noqa: ANN401
    """Return for each width the first candidate that works on ``place``; a width without one is left out.

    ``finish`` waits for the place.
    """
    found = {}
    with without_fallback():
        for width, tries in candidates.items():
            for operator, dtype in tries:
                scatter = Scatter(operator, dtype)
                if _works(place, width, scatter, finish):
                    found[width] = scatter
                    break
    return found


def _works(place: Any, width: int, scatter: Scatter, finish: Callable[[], None]) -> bool:  # noqa: ANN401
    """Write elements 5 and 2 of some memory, at an offset, and compare every byte."""
    memory = PaddleMemory(None, empty_words(place, 64), 0, 64, 8)
    staged = np.arange(64, dtype=np.uint8) + np.uint8(128)
    staged[:8].view(np.int32)[:] = (5, 2)
    should = np.arange(64, dtype=np.uint8)
    upload = PaddleMemory(None, empty_words(place, 64), 0, 64, 8)
    for to, data in ((memory, should), (upload, staged)):
        to.bytes(0, 64).copy_(host_tensor(data), True)
    values = 64 // width - 2
    try:
        scatter.put(
            memory.typed(scatter.dtype), upload.typed("int32")[0:2], upload.typed(scatter.dtype)[values : values + 2]
        )
        finish()
    except Exception:  # noqa: BLE001 (Paddle's error for a missing kernel differs between versions: it is not there)
        return False
    end = 64 - 2 * width
    should[5 * width : 6 * width] = staged[end : end + width]
    should[2 * width : 3 * width] = staged[end + width :]
    got = np.zeros(64, np.uint8)
    host_tensor(got).copy_(memory.bytes(0, 64), True)
    return bool((got == should).all())
