"""The transport interface of :class:`hal_core.handover.BlockTransfer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hal_core.frames.envelope import Buffer
from hal_core.handover.protocol import Description


class Wire(Protocol):
    """Carries frames between transfers, each identified by its session: in order, none lost, or the peer is lost.

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

    def send(self, peer: int, *parts: Buffer) -> bool:
        """Send a frame, in parts, to a session that this side has connected to. False if there is no room now."""

    def reply(self, peer: int, *parts: Buffer) -> None:
        """Send a frame to a session that has connected here; a session that is gone is reported by :meth:`lost`."""

    def receive(self) -> Iterable[tuple[int, Buffer]]:
        """Return the received frames with their sessions, in order."""

    def lost(self) -> Iterable[int]:
        """Return the sessions that were lost since the last call: their connections have ended or are silent. Their
        frames were received before."""

    def has_come(self, peer: int) -> bool:
        """Return whether that session is connected here."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Return the sockets to poll for them."""

    def close(self) -> None:
        """Release everything. Idempotent."""
