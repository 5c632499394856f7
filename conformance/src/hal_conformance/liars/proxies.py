"""Proxies of liars: tickets, events and targets over honest ones, and raw writes without checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from hal_core.memory.copies import Bytes, CopyTicket
from hal_core.memory.views import View
from hal_core.tickets import Mode, Ticket

if TYPE_CHECKING:
    from hal_core.memory.views import Memory
    from hal_core.streams import Event, Stream

K = TypeVar("K")
HELD = ("async_h2d", "can_hold_stream")
"""Capabilities needed to detect a lie about asynchronous writes."""
HELD_COPIES = ("async_d2h", "can_hold_stream")
"""The same for copies out."""
BOTH = (*HELD, *HELD_COPIES)
"""The same for the order of writes and copies."""
RING = ("staging", *HELD)
"""The same for the staging ring."""
BELOW = (*HELD, "primitives")
"""The same, over a vendor's primitives."""


class Proxy(CopyTicket):
    """A ticket, perhaps of a copy, over an honest one. A pending copy has bytes of zero."""

    __slots__ = ("inner", "mode", "nbytes")

    def __init__(self, inner: Ticket, nbytes: Sequence[int] = ()) -> None:
        super().__init__()
        self.inner, self.nbytes = inner, tuple(nbytes)
        self.mode: Mode = inner.mode

    @property
    def data(self) -> Sequence[Bytes]:
        """Return the bytes that have arrived."""
        if not self.inner.done():
            return [np.zeros(size, np.uint8) for size in self.nbytes]
        arrived: Any = self.inner
        return arrived.data  # type: ignore[no-any-return]

    def done(self) -> bool:
        """Return the honest ticket's answer."""
        return self.inner.done()

    def _block(self, timeout: float | None) -> bool:
        return self.inner._block(timeout)

    def failure(self) -> BaseException | None:
        """Return the honest ticket's error."""
        return self.inner.failure()


class EventTicket(Ticket):
    """A ticket that is done when an event has passed."""

    __slots__ = ("event",)
    mode: Mode = "async"

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def done(self) -> bool:
        """Return whether the event has passed."""
        return self.event.done()

    def _block(self, timeout: float | None) -> bool:
        return self.event.wait(timeout)

    def failure(self) -> BaseException | None:
        """Return no error."""
        return None


class ProxyEvent:
    """An event over an honest one."""

    def __init__(self, true: Event) -> None:
        self.true = true

    def done(self) -> bool:
        """Return the honest event's answer."""
        return self.true.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the honest event."""
        return self.true.wait(timeout)


def variant(base: type[K], **methods: Callable[..., Any]) -> type[K]:
    """Return a subclass of a ticket or event with other methods, which get the object first."""
    return type(f"Lying{base.__name__}", (base,), {"__slots__": (), **methods})


def given(one: Any, name: str, method: Callable[..., Any]) -> Any:  # noqa: ANN401 (a stream or a ticket of any class)
    """Return the object itself, with one method replaced; once."""
    kind = type(one)
    if kind.__dict__.get(name) is not method:
        body: dict[str, Any] = {name: method} if hasattr(one, "__dict__") else {name: method, "__slots__": ()}
        one.__class__ = type(f"Lying{kind.__name__}", (kind,), body)
    return one


def moved(target: View, shape: tuple[int, ...], strides: tuple[int, ...], run: int) -> View | None:
    """Return the runs of a target with other strides, and an axis for the elements of a run; None if they leave the
    memory."""
    item = target.dtype.itemsize
    view = View(target.memory, target.offset, (*shape, run // item), (*strides, item), target.dtype, target.owner)
    low, high = view.bounds()
    return view if low >= 0 and high <= target.memory.nbytes else None


def put(device: Any, memory: Memory, runs: Sequence[tuple[int, bytes]], stream: Stream) -> Ticket:  # noqa: ANN401
    """Write ``(offset, bytes)`` runs without checks, in stream order."""
    from ..harness.backdoor import put as raw

    return raw(device, memory, runs, stream)
