"""Paddle's bindings, its current device, and its places by name, with errors that list the existing ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hal_core import Unavailable
from hal_core.devices import check_index, check_processor


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


def import_paddle(device: str, cure: str) -> Any:  # noqa: ANN401 (a module without types)
    """Return the module.

    :raises Unavailable: if it cannot be imported.
    """
    check_processor()
    try:
        import paddle
    except ImportError as error:
        raise Unavailable(f"paddle cannot be imported: {error}", cure=cure, device=device) from error
    return paddle


def custom_place(device: str, kind: str, index: int, cure: str) -> Any:  # noqa: ANN401 (a Paddle place)
    """Return the place ``index`` of the CustomDevice type ``kind``.

    :raises Unavailable: if Paddle cannot be imported, or does not have that type.
    :raises InvalidValue: for an index beyond its devices.
    """
    paddle = import_paddle(device, cure)
    kinds = list(paddle.device.get_all_custom_device_type() or ())
    if kind not in kinds:
        known = f"it knows {', '.join(kinds)}" if kinds else "it knows none"
        raise Unavailable(f"Paddle knows no device type {kind!r}; {known}", cure=cure, device=device)
    check_index(device, index, int(paddle_core().get_custom_device_count(kind)))
    return paddle.CustomPlace(kind, index)
