"""Work on a place of Paddle: the calls that writers and collectives make around it."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from hal_core.devices import DeviceBase

from .paddle_memory import Bytes, Tensor

if TYPE_CHECKING:
    from hal_core import Event, Stream, Ticket
    from hal_core.devices import Memory, StagingRing

    from .scatter_probe import Scatter


class WorkingPlace(DeviceBase):
    """A place on which work is queued in the order of a stream. Each kind of device implements the abstract methods.

    ``place``: Paddle's place. ``scatters``: its working scatter for each element width. ``staging``: the ring that
    uploads read. ``blocking``: whether copies are blocking.
    """

    blocking: ClassVar[bool] = False
    place: Any
    scatters: dict[int, Scatter]
    staging: StagingRing

    @abstractmethod
    def current(self, stream: Stream) -> AbstractContextManager[None]:
        """Make Paddle queue work on ``stream`` within the context."""

    @abstractmethod
    def before_write(self, memory: Memory, stream: Stream) -> None:
        """Order a write after pending reads of the memory."""

    @abstractmethod
    def after_work(self, stream: Stream, keep: object) -> tuple[Event, Ticket]:
        """Return the event and the ticket of the work just queued on ``stream``; ``keep`` lives until it is done."""

    @abstractmethod
    def read_now(self, source: Tensor, target: Bytes, stream: Stream) -> None:
        """Copy a contiguous tensor to the host, after the work on ``stream``, and wait."""
