"""Primitives that a device's plugin has not written yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING

from hal_core import PluginError
from hal_core.devices import DeviceBase, StreamPrimitives

if TYPE_CHECKING:
    from hal_core import BoundDevice


def unwritten(device: BoundDevice, error: Exception) -> PluginError | None:
    """Return the error that names the primitive; None for another one, as a runner or a library may raise
    :class:`NotImplementedError` too."""
    if not isinstance(error, NotImplementedError):
        return None
    frames = [frame for frame, _ in walk_tb(error.__traceback__)][::-1]
    inner: list[str] = []  # modules of functions and classes that the device called, such as those of its memory
    for frame in frames:
        owner = frame.f_locals.get("self")
        if isinstance(owner, DeviceBase | StreamPrimitives):
            break
        inner.append(frame.f_globals.get("__name__", ""))
    else:
        return None
    own = type(owner).__module__  # the plugin's, even if the method is a base's default
    package = own.rpartition(".")[0] or own
    if any(not f"{module}.".startswith(f"{package}.") for module in inner):
        return None
    name = device.name.partition(":")[0]
    cure = f"write it in {(inner or [own])[0]}: docs/adding-a-device.md; hal conform {name} tries each primitive"
    return PluginError(f"its primitive {frames[0].f_code.co_name} is not written", cure=cure, device=device.name)


@contextmanager
def named_unwritten(device: BoundDevice) -> Iterator[None]:
    """Have a primitive that is not written named by the error that is raised."""
    try:
        yield
    except NotImplementedError as error:
        if (fault := unwritten(device, error)) is None:
            raise
        raise fault from error
