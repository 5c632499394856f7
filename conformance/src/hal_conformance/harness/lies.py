"""Mixins over an opened device, the basis of liars and of injected faults."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_core.contract.device import Device


class Lie(ABC):  # noqa: B024 (an ABC for its layout, see below)
    """Base of device liars: a mixin over the class of an honest, opened device.

    It is an ABC because DeviceBase is one: otherwise Python refuses to change an opened device's class.
    """


def lay_over(device: Device, mixin: type) -> Device:
    """Lay a mixin over the class of an opened device."""
    kind = type(device)
    device.__class__ = type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), {})
    return device
