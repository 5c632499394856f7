"""Paddle's places by name, with errors that list the existing ones."""

from __future__ import annotations

from typing import Any

from hal_core import Unavailable
from hal_core.devices import check_index, check_processor, paddle_core


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
