"""Options of ``open`` for a device's staging ring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ..errors import InvalidValue
from ..timeouts import TIMEOUTS
from .base import check_options

O = TypeVar("O", bound="RingOptions")  # noqa: E741 (of a class derived from it)
LEAST = 256
"""Bytes of the smallest ring: one span (:data:`hal_core.devices.staging.ALIGNMENT`)."""


@dataclass(frozen=True, slots=True)
class RingOptions:
    """Options of the staging ring: bytes at first and at most, and seconds to wait for a full ring. ``value_limit``:
    bytes of device memory that one value larger than the ring may occupy in transit; a larger one waits for its stream
    (G3).

    A device with more options derives from it. Raises :class:`InvalidValue` for invalid values.
    """

    ring_start: int = 1 << 20
    ring_limit: int = 64 << 20
    deadline: float = field(default_factory=lambda: TIMEOUTS.ring)
    value_limit: int = 1 << 30

    def __post_init__(self) -> None:
        for name, value in (("ring_start", self.ring_start), ("ring_limit", self.ring_limit)):
            if type(value) is not int or value < LEAST:
                raise InvalidValue(f"{name} = {value!r}", cure=f"give at least {LEAST} bytes", argument="options")
        if type(self.value_limit) is not int or self.value_limit < 0:
            what = f"value_limit = {self.value_limit!r}"
            raise InvalidValue(what, cure="give bytes, 0 for none", argument="options")
        if self.ring_start > self.ring_limit:
            raise InvalidValue("ring_start is larger than ring_limit", cure="raise ring_limit", argument="options")
        if type(self.deadline) not in (int, float) or not self.deadline > 0:
            raise InvalidValue(f"deadline = {self.deadline!r}", cure="give more than 0 seconds", argument="options")

    @classmethod
    def of(cls: type[O], device: str, given: Mapping[str, Any]) -> O:
        """Return the options given to a device. Raises :class:`InvalidValue`, naming it, for an unknown one."""
        check_options(device, given, [one.name for one in fields(cls)])
        try:
            return cls(**given)
        except InvalidValue as error:
            raise error.located(device=device) from None
