"""Mixins over an opened device, the basis of liars and of injected faults."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal_core.contract.device import Device

_MIXED: dict[tuple[type, type], type] = {}
"""Classes of primitives with a mixin, each for all devices: they take events of their own class of primitives alone."""


class Lie(ABC):  # noqa: B024 (an ABC for its layout, see below)
    """Base of device liars: a mixin over the class of an honest, opened device.

    It is an ABC because DeviceBase is one: otherwise Python refuses to change an opened device's class.
    """

    def laid(self) -> None:  # noqa: B027 (most change nothing)
        """Change the opened device besides, once this mixin is over its class; repeatable."""


def lay_over(device: Device, mixin: type) -> Device:
    """Lay a mixin over the class of an opened device."""
    kind = type(device)
    device.__class__ = type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), {})
    if issubclass(mixin, Lie):
        laid: Any = device
        mixin.laid(laid)
    return device


def lay_below(device: Any, mixin: type) -> None:  # noqa: ANN401 (an opened device over a vendor's primitives)
    """Lay a mixin over the class of a device's primitives, once, and over the calls of them that its events keep."""
    below = device.primitives
    if not isinstance(below, mixin):
        key = mixin, type(below)
        if key not in _MIXED:
            _MIXED[key] = type(f"{mixin.__name__}Of{type(below).__name__}", key, {})
        below.__class__ = _MIXED[key]
    events = device.events
    events.query, events.synchronize, events.error = below.event_query, below.event_synchronize, below.event_error
    events._record = below.event_record
