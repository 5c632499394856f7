"""The ticket of a collective that a device library runs on a stream, watched by the group's watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tickets import Mode, Ticket
from .primitives import poll

if TYPE_CHECKING:
    from ..ranks.watchdog import Watchdog
    from ..streams import Event


class CollectiveTicket(Ticket):
    """A broadcast in flight: done when its event has passed, failed when the watchdog has given the group up.

    An event also passes when a library gives a collective up, without an error (the runtime keeps the error for the
    next wait of a stream). So the watchdog decides: if a group was given up, its data does not count as sent.
    """

    __slots__ = ("_error", "_event", "_number", "_watchdog", "mode")

    def __init__(self, event: Event, watchdog: Watchdog, mode: Mode, number: int) -> None:
        """``number``: the watchdog's call that has ended, with all before it, when the event has passed."""
        super().__init__()
        self._event, self._watchdog, self._number = event, watchdog, number
        self._error: BaseException | None = None
        self.mode: Mode = mode

    def done(self) -> bool:
        if self._error is not None:
            return True
        try:
            passed = self._event.done()
        except Exception as error:  # noqa: BLE001 (kept for wait() and the next hook: done() never raises)
            self._error = self._watchdog.failed(error)
            return True
        if self._watchdog.reason:
            self._error = self._watchdog.error(self._watchdog.reason)
            return True
        if passed:
            self._watchdog.end(self._number)
        return passed

    def _block(self, timeout: float | None) -> bool:
        return poll(self.done, timeout)

    def failure(self) -> BaseException | None:
        return self._error
