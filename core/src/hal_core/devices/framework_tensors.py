"""A framework's tensors over device memory, without a copy."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from ..errors import InvalidValue, Unavailable
from ..memory.dlpack import DLPACK_CPU
from ..memory.views import View

FRAMEWORKS = {
    "paddle": "paddle.utils.dlpack",
    "torch": "torch",
    "cupy": "cupy",
    "numpy": "numpy",
}
"""Framework to the module whose ``from_dlpack`` is called; also the order of the defaults."""


def framework_of(name: str, *, host: bool) -> str:
    """Return the requested framework; by default the first one that this process has imported, on the host finally
    NumPy.

    Raises :class:`InvalidValue` for an unknown one, and if none is imported.
    """
    if not name:
        name = next((one for one in ("paddle", "torch", "cupy") if one in sys.modules), "numpy" if host else "")
    if name not in FRAMEWORKS:
        raise InvalidValue(
            f"{name!r} is not a framework with tensors for hal" if name else "no framework is imported",
            cure=f"import one first, or name one of {', '.join(FRAMEWORKS)}",
            argument="framework",
        )
    return name


def tensor_over(view: View, framework: str = "") -> Any:  # noqa: ANN401 (a framework's tensor)
    """Return a tensor made by DLPack. Raises :class:`Unavailable` if the device or the framework cannot make it, and
    :class:`InvalidValue` for reversed axes, which torch and Paddle have not: one ends the process by them."""
    device: Any = view.memory.device
    place = device.dlpack_device
    located = f"{device.name}:{device.index}"
    if place is None:
        raise Unavailable(
            "frameworks cannot use the addresses of its memory",
            cure="use device.copy_out and async_set_value",
            device=located,
        )
    chosen = framework_of(framework, host=place[0] == DLPACK_CPU)
    if chosen in ("paddle", "torch") and min(view.strides, default=0) < 0:
        what = f"{chosen} has no reversed axes as {view!r} has"
        raise InvalidValue(what, cure="take the view forwards, and flip the tensor", device=located, argument="view")
    try:
        module = import_module(FRAMEWORKS[chosen])
        return module.from_dlpack(view)
    except (ImportError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise Unavailable(
            f"{chosen} cannot make a tensor of {view!r}: {error}",
            cure="name another framework, or install a build of it for this device",
            device=located,
        ) from error


def paddle_piece(base: Any, begin: int, view: View) -> Any:  # noqa: ANN401 (Paddle tensors)
    """Return a contiguous view's memory as a Paddle tensor; the memory starts ``begin`` bytes into ``base``, a flat
    int64 tensor. Raises :class:`InvalidValue` for another view."""
    if view.collapsed()[0]:
        raise InvalidValue(f"{view!r} has gaps or reversed axes", cure="take a contiguous one", argument="view")
    first = (begin + view.offset) // view.dtype.itemsize
    return base.view(view.dtype.name)[first : first + view.size].view(list(view.shape))
