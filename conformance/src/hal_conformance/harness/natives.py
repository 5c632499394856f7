"""What a device asks of its vendor's primitives and gives back: memory, events, streams."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from typing import TYPE_CHECKING, Any

from .lies import lay_below

if TYPE_CHECKING:
    from hal_core.contract.device import Device

PAIRS = {
    "allocate": "free", "allocate_host": "free_host", "event_create": "event_destroy", "stream_create": "stream_destroy"
}  # fmt: skip


ALSO = {"event_create_timed": "event_create"}
"""Calls that make the same as another one."""


class Counted(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: what was made and not given back since it was laid."""

    @property
    def held(self) -> Counter[str]:
        """The counts by the name of the call that makes one."""
        found: Counter[str] = self.__dict__.setdefault("_held", Counter())
        return found


def _counting(name: str, by: int, kind: str) -> Any:  # noqa: ANN401 (a method)
    def call(self: Any, *arguments: Any) -> Any:  # noqa: ANN401 (the vendor's)
        result = getattr(super(Counted, self), name)(*arguments)
        if by < 0 or result is not None:  # None: pageable memory, which is no object of the runtime
            self.held[kind] += by
        return result

    return call


for _make, _free in PAIRS.items():
    setattr(Counted, _make, _counting(_make, 1, _make))
    setattr(Counted, _free, _counting(_free, -1, _make))


for _make, _same in ALSO.items():
    setattr(Counted, _make, _counting(_make, 1, _same))


def counted(device: Device) -> Counter[str]:
    """Count from now on; the counts that change with the device's calls."""
    own: Any = device
    lay_below(own, Counted)
    found: Counter[str] = own.primitives.held
    return found
