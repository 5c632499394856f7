"""Liars whose tickets answer for something else than their work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.contract.markers import hookimpl
from hal_core.tickets import Mode, Ticket

from . import Lie, liar

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.plan import WritePlan
    from hal_core.memory.values import Value
    from hal_core.memory.views import View
    from hal_core.streams import Stream

HELD = ("async_h2d", "can_hold_stream")


class Wrapped(Ticket):
    """A ticket around another one, whose methods a liar replaces."""

    __slots__ = ("_inner", "_stream", "_waited")
    mode: Mode = "async"

    def __init__(self, inner: Ticket, stream: Stream) -> None:
        super().__init__()
        self._inner, self._stream, self._waited = inner, stream, False

    def done(self) -> bool:
        return self._inner.done()

    def _block(self, timeout: float | None) -> bool:
        self._waited = self._inner._block(timeout)
        return self._waited

    def failure(self) -> BaseException | None:
        return self._inner.failure()


class OnceWaited(Wrapped):
    """Done once a wait has ended."""

    __slots__ = ()

    def done(self) -> bool:
        return self._waited


class OfTheStream(Wrapped):
    """Done is an idle stream."""

    __slots__ = ()

    def done(self) -> bool:
        return self._waited or self._stream.record().done()


class Wraps(Lie):
    """Base: every write's ticket is of the class ``made``."""

    made: type[Wrapped]

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Wrap the ticket."""
        return self.made(super().submit(plan, stream), stream)  # type: ignore[misc]

    @hookimpl
    def async_set_value(self, device: Device, target: View, value: Value, stream: Stream) -> Ticket:
        """Wrap the ticket."""
        return self.made(super().async_set_value(device, target, value, stream), stream)  # type: ignore[misc]


@liar(3, "a ticket is done only once somebody has waited for it", requires=HELD)
class DoneOnceWaited(Wraps):
    """Only a wait queries the driver."""

    made = OnceWaited


@liar(3, "a ticket asks its stream, which has later work", requires=HELD, seen="torch openreg: stream query")
class DoneWithItsStream(Wraps):
    """A query of the queue in place of one of the event."""

    made = OfTheStream
