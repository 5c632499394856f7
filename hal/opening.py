"""Opening of a device: selection, opening, checks of its capabilities, and binding of its hooks."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from hal_core import Capabilities, HalError, InvalidValue, PluginError

from .discovery import Entry
from .local_rank import LocalRank
from .observing import chosen, observe
from .selection import ENVIRONMENT, Choice, use_first

if TYPE_CHECKING:
    from hal_core import BoundDevice, Device


def open_device(
    name: str | None = None,
    *,
    index: int | None = None,
    require: Mapping[str, str | bool] | None = None,
    options: Mapping[str, object] | None = None,
    among: LocalRank | None = None,
) -> BoundDevice:
    """Open a device and bind its hooks.

    :param name: a device name or ``name:index``; else ``HAL_DEVICE``; else the best available device by priority.
    :param index: which of several devices of that name; 0 unless ``name`` has another.
    :param require: required capabilities (:meth:`hal_core.contract.capabilities.Capabilities.check`), for example
        ``{"async_set_value": "async"}``; refused here rather than slowed silently (G7).
    :param options: passed to the plugin unchanged.
    :param among: this rank's place among those on this host. Each opens a device of its own, counted from ``index``.

    Observers that ``HAL_OBSERVERS`` names see every hook call of the device (:mod:`hal.observing`).

    :raises DeviceNotFound: no plugin of that name; the error lists the installed ones.
    :raises Unavailable: the named device cannot be used here, or none can.
    :raises PluginError: a plugin cannot be imported, breaks the contract, or was made for another one.
    :raises InvalidValue: for more ranks than devices.
    :raises CapabilityMissing: the device lacks a capability of ``require``; it is closed again.
    """
    for argument, value in (("require", require), ("options", options)):
        if value is not None and not isinstance(value, Mapping):
            raise InvalidValue(f"{value!r} is no mapping", cure="give a dict", argument=argument)
    observers = chosen()

    def opened(choice: Choice) -> BoundDevice:
        if among is not None:
            choice = replace(choice, index=among.index(choice.plugin, choice.index))
        return _open(choice, dict(require or {}), dict(options or {}), observers)

    return use_first(opened, name, index)


@contextmanager
def open_for_command(
    device: str | None, require: Mapping[str, str | bool], *, among: LocalRank | None = None
) -> Iterator[BoundDevice]:
    """As :func:`open_device`, for commands with ``--device`` and ``--require``, and closed at the end: errors name
    these options, or the primitive that the device's plugin has not written, and Paddle's import warns of nothing."""
    try:
        with quiet_paddle():
            bound = open_device(device, require=require, among=among)
    except HalError as error:
        if error.argument == "require":
            error.argument = "--require"
        elif error.argument == "name" and device is not None:
            error.argument = ENVIRONMENT if device == os.environ.get(ENVIRONMENT, "").strip() else "--device"
        raise
    from .unwritten import named_unwritten

    with named_unwritten(bound), bound:
        yield bound


@contextmanager
def quiet_paddle() -> Iterator[None]:
    """Ignore what Paddle's import warns of: it cannot compile without ccache, and nothing here compiles. The handler
    and level that it gives the root logger are taken back, because they would print the records of all libraries."""
    before, level = [*logging.root.handlers], logging.root.level
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="paddle")
            yield
    finally:
        for handler in [one for one in logging.root.handlers if one not in before]:
            logging.root.removeHandler(handler)
            logging.root.setLevel(level)


def _open(
    choice: Choice, require: Mapping[str, str | bool], options: Mapping[str, object], observers: Sequence[Entry]
) -> BoundDevice:
    entry = choice.entry
    try:
        device = choice.plugin.open(choice.index, options)
    except HalError:
        raise
    except Exception as error:
        raise entry.error(f"opening index {choice.index} failed", own=error) from error
    try:
        capabilities: object = getattr(device, "capabilities", None)
        if not isinstance(capabilities, Capabilities):
            raise entry.error(f"the opened device has capabilities {capabilities!r}, not a hal_core.Capabilities")
        _check_name(choice, device, capabilities)
        capabilities.check(require, device.name)
        bound = _bound(choice, device)
        observe(bound, observers)
        return bound
    except BaseException as error:
        try:
            device.close()
        except Exception as second:  # noqa: BLE001 (the first error is the one to report)
            error.add_note(f"closing the device failed too: {type(second).__name__}: {second}")
        raise


def _check_name(choice: Choice, device: Device, capabilities: Capabilities) -> None:
    """Raise :class:`PluginError` unless the device has the requested name or declares its substitute. Errors and logs
    use it."""
    name = choice.entry.name
    if capabilities.substituted:
        name = f"{name} (substituted: {capabilities.substituted})"
    stated: object = getattr(device, "name", None)
    if stated != name:
        raise choice.entry.error(f"the opened device has the name {stated!r}, not {name!r}")


def _bound(choice: Choice, device: Device) -> BoundDevice:
    from hal_core import bind

    try:
        return bind(device)
    except PluginError as error:
        error.what = f"{choice.entry.who}: {error.what}"  # the binder has the device, but not its distribution
        raise
    except Exception as error:
        raise choice.entry.error("binding its hooks failed", own=error) from error
