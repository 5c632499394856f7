"""Paddle's bindings, and its current device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .processor import check_processor


def paddle_core() -> Any:  # noqa: ANN401 (a module without types)
    """Return Paddle's own bindings, which ``paddle.device`` uses. Raises :class:`Unavailable` on a CPU without AVX2."""
    check_processor()
    import paddle

    return paddle.base.core


@contextmanager
def paddle_device(place: object) -> Iterator[None]:
    """Make Paddle create new tensors on ``place``, a place or its name ("gpu:0"), within the context. Its collectives
    do."""
    import paddle

    before = paddle.get_device()
    paddle.set_device(str(place).removeprefix("Place(").removesuffix(")"))
    try:
        yield
    finally:
        paddle.set_device(before)
