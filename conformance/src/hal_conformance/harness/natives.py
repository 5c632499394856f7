"""What a device asks of its vendor's primitives and gives back: memory, events, streams."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from typing import TYPE_CHECKING, Any

from hal_core.contract.counters import Counters
from hal_core.devices import Primitives

from .lies import lay_below

if TYPE_CHECKING:
    from collections.abc import Callable

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


WORK = {"copy_in": "uploads", "launch": "launches", "copy_out": "copies_out"}
"""Primitives that are one call of the runtime each, and what a device counts them as."""


class Reached(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: ``reached`` counts their calls of the runtime."""

    @property
    def reached(self) -> Counter[str]:
        """The counts by the names of :class:`Counters`."""
        found: Counter[str] = self.__dict__.setdefault("_reached", Counter())
        return found


def _reaching(name: str, kind: str) -> Any:  # noqa: ANN401 (a method)
    def call(self: Any, *arguments: Any) -> None:  # noqa: ANN401 (the vendor's)
        getattr(super(Reached, self), name)(*arguments)
        self.reached[kind] += 1

    return call


for _name, _kind in WORK.items():
    setattr(Reached, _name, _reaching(_name, _kind))


def reaching(device: Device) -> Callable[[], Counters] | None:
    """Return what counts the calls that reach the driver from now on: the device's own ``probe_counts``, or a proxy
    around its primitives; None where there is neither, or a compound primitive is the vendor's own."""
    own: Any = device
    if hasattr(own, "probe_counts"):
        return own.probe_counts  # type: ignore[no-any-return]
    below = getattr(own, "primitives", None)
    names = ("submit", "submit_copy_out")
    if below is None or any(getattr(type(below), name, None) is not getattr(Primitives, name) for name in names):
        return None
    lay_below(own, Reached)

    def counts() -> Counters:
        found = own.primitives.reached
        return Counters(found["uploads"] + found["launches"], *(found[kind] for kind in WORK.values()))

    return counts


def counted(device: Device) -> Counter[str]:
    """Count from now on; the counts that change with the device's calls."""
    own: Any = device
    lay_below(own, Counted)
    found: Counter[str] = own.primitives.held
    return found
