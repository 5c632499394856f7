"""What a :class:`hal_core.handover.BlockTransfer` needs of whatever carries its messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hal_core.frames.envelope import Buffer
from hal_core.handover.protocol import Description


class Wire(Protocol):
    """Carries messages between transfers, each known by its session. May lose messages, never changes their order.

    Who sends blocks connects to who takes them; what the latter says goes back the same way.
    """

    url: str
    """Where this one listens."""
    public_key: str
    """The key it is known by, "" if none."""
    session: int
    """Random for each life."""

    def admit(self, peer: Description) -> None:
        """Let that peer connect here."""

    def connect(self, peer: Description) -> None:
        """Begin to connect to that peer. Raises :class:`InvalidValue` for an address that makes no sense."""

    def disconnect(self, peer: int) -> None:
        """Give up the connection to that session."""

    def renewed(self) -> Iterable[int]:
        """Sessions that were connected to anew: what was on its way there may be lost."""

    def send(self, peer: int, message: bytes) -> bool:
        """Send to a session that was connected to. False: not now."""

    def reply(self, peer: int, message: bytes) -> bool:
        """Send to a session that has connected here. False: not now, or it is gone."""

    def receive(self) -> Iterable[Buffer]:
        """The messages that have come."""

    @property
    def sockets(self) -> Sequence[Any]:
        """What can be polled for them."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
