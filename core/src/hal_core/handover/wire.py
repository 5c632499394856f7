"""The transport interface of :class:`hal_core.handover.BlockTransfer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hal_core.frames.envelope import Buffer
from hal_core.handover.protocol import Description


class Wire(Protocol):
    """Carries messages between transfers, each identified by its session. May lose messages, never reorders them.

    The sender of blocks connects to the receiver; replies use the same connection.
    """

    url: str
    """The address where this one listens."""
    public_key: str
    """Its public key, "" if it has none."""
    session: int
    """Random for each start."""

    def admit(self, peer: Description) -> None:
        """Let that peer connect here."""

    def connect(self, peer: Description) -> None:
        """Start connecting to that peer. Raises :class:`InvalidValue` for an invalid address."""

    def disconnect(self, peer: int) -> None:
        """Close the connection to that session."""

    def renewed(self) -> Iterable[int]:
        """Return sessions that were reconnected; messages on the way to them may be lost."""

    def send(self, peer: int, message: bytes) -> bool:
        """Send to a connected session. False if it cannot be sent now."""

    def reply(self, peer: int, message: bytes) -> bool:
        """Reply to a session that has connected here. False if it cannot be sent now or the session is gone."""

    def receive(self) -> Iterable[Buffer]:
        """Return the received messages."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Return the sockets to poll for them."""

    def close(self) -> None:
        """Release everything. Idempotent."""
