"""What a device asks of its vendor's primitives and gives back: memory, events, streams."""

from __future__ import annotations

import gc
import sys
from abc import ABC
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hal_core.contract.counters import Counters
from hal_core.devices import Primitives

from .lies import lay_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from hal_core.contract.device import Device

PAIRS = {
    "allocate": "free", "allocate_host": "free_host", "event_create": "event_destroy", "stream_create": "stream_destroy"
}  # fmt: skip


ALSO = {"event_create_timed": "event_create"}
"""Calls that make the same as another one."""


WORK = {"copy_in": "uploads", "launch": "launches", "copy_out": "copies_out"}
"""Primitives that are one call of the runtime each, and what a device counts them as."""
COMPOUNDS = ("submit", "submit_copy_out")
"""Primitives that are several."""


OWN = ("hal_core.", "hal_conformance.harness.", "builtins")
"""Beginnings of the modules whose classes are none of a vendor's primitives."""


class Counted(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: what was made and not given back since it was laid."""

    @property
    def held(self) -> Counter[str]:
        """The counts by the name of the call that makes one."""
        found: Counter[str] = self.__dict__.setdefault("_held", Counter())
        return found


class Reached(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: ``reached`` counts their calls of the runtime, by the names of :class:`Counters`."""

    @property
    def reached(self) -> Counter[str]:
        """The counts since it was laid."""
        found: Counter[str] = self.__dict__.setdefault("_reached", Counter())
        return found


def _counting(owner: type, name: str, by: int, kind: str, counts: str) -> None:
    def call(self: Any, *arguments: Any) -> Any:  # noqa: ANN401 (the vendor's)
        result = getattr(super(owner, self), name)(*arguments)
        if name in WORK or by < 0 or result is not None:  # None: pageable memory, which is no object of the runtime
            getattr(self, counts)[kind] += by
        return result

    setattr(owner, name, call)


for _make, _free in PAIRS.items():
    _counting(Counted, _make, 1, _make, "held")
    _counting(Counted, _free, -1, _make, "held")
for _make, _same in ALSO.items():
    _counting(Counted, _make, 1, _same, "held")
for _name, _kind in WORK.items():
    _counting(Reached, _name, 1, _kind, "reached")


def reaching(device: Device) -> Callable[[], Counters] | None:
    """Return what counts the calls that reach the driver: the device's own ``probe_counts``, a proxy around its
    primitives, or the more of both; None where there is neither, or a compound primitive is the vendor's own."""
    own: Any = device
    below, probe = getattr(own, "primitives", None), getattr(own, "probe_counts", None)
    if below is None or any(getattr(type(below), name, None) is not getattr(Primitives, name) for name in COMPOUNDS):
        return probe
    lay_below(own, Reached)
    first = probe() if probe else Counters()

    def calls() -> tuple[int, ...]:
        found = own.primitives.reached
        return found["uploads"] + found["launches"], *(found[kind] for kind in WORK.values())

    before = calls()

    def counts() -> Counters:
        own_counts = probe() - first if probe else Counters()
        seen = zip(("submissions", *WORK.values()), before, calls(), strict=True)
        return Counters(**{name: max(getattr(own_counts, name), now - then) for name, then, now in seen})

    return counts


class Below:
    """What this thread does below a device: ``lines`` of Python in the primitives that give work to the runtime, and
    ``waits`` for an event."""

    def __init__(self, device: Device) -> None:
        self.lines = self.waits = 0
        below: Any = getattr(device, "primitives", None)
        kinds = [kind for kind in type(below).__mro__ if not kind.__module__.startswith(OWN)]
        calls = [vars(kind).get(name) for kind in kinds for name in (*WORK, *COMPOUNDS)]
        self._codes = {getattr(call, "__code__", None) for call in calls}
        waits = [vars(kind).get("event_synchronize") for kind in type(below).__mro__]
        self._waits = {getattr(wait, "__code__", None) for wait in waits}
        self._inside: set[FrameType] = set()

    def _enters(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 (a function of sys.settrace)
        self.waits += frame.f_code in self._waits
        if frame.f_code not in self._codes and frame.f_back not in self._inside:
            return None
        self._inside.add(frame)
        return self._runs

    def _runs(self, frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 (a function of sys.settrace)
        self.lines += event == "line"
        if event == "return":
            self._inside.discard(frame)
        return self._runs


@contextmanager
def looking_below(device: Device, *, at_all: bool = True) -> Iterator[Below]:
    """Yield what this thread does below the device meanwhile, whatever the device counts itself; ``at_all``: or look
    for nothing, as it takes time."""
    if not at_all:
        yield Below(device)
        return
    found, before, collects = Below(device), sys.gettrace(), gc.isenabled()
    gc.disable()  # what a collection calls is none of the device's lines
    sys.settrace(found._enters)
    try:
        yield found
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def counted(device: Device) -> Counter[str]:
    """Count from now on; the counts that change with the device's calls."""
    own: Any = device
    lay_below(own, Counted)
    found: Counter[str] = own.primitives.held
    return found
