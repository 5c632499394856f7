"""A wire within one process, whose messages a test can hold, lose, repeat or change in transit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hal_core.errors import InvalidValue
from hal_core.handover.protocol import Description
from hal_core.output.sinks import new_session

Filter = Callable[[int, int, bytes], Sequence[bytes]]
"""From the sessions of sender and receiver and a message to the messages delivered."""


def _pass(_from: int, _to: int, message: bytes) -> Sequence[bytes]:
    return (message,)


class MemoryNet:
    """Wires that reach each other by their urls. ``deliver`` may be set to a filter of messages."""

    def __init__(self) -> None:
        self.wires: dict[int, MemoryWire] = {}
        self.deliver: Filter = _pass
        self.sent = 0
        """The number of messages given to any wire."""

    def wire(self, url: str) -> MemoryWire:
        """Return a new wire that listens at ``url``."""
        made = MemoryWire(self, url)
        self.wires[made.session] = made
        return made

    def cut(self) -> None:
        """Break all connections: messages in transit are lost, and every connection is made again."""
        for wire in self.wires.values():
            wire.inbox.clear()
            wire.again |= wire.connected


class MemoryWire:
    """One end. See :class:`hal_core.handover.Wire`."""

    def __init__(self, net: MemoryNet, url: str) -> None:
        self.net, self.url, self.public_key, self.session = net, url, "", new_session()
        self.inbox: deque[bytes] = deque()
        self.connected: set[int] = set()
        self.again: set[int] = set()
        self.room = True
        """If false, it accepts no message."""

    def admit(self, peer: Description) -> None:
        """Allow any peer to connect."""

    def connect(self, peer: Description) -> None:
        """See :class:`hal_core.handover.Wire`."""
        if not peer.url:
            raise InvalidValue("'' is not an address", cure="give the peer's own description", argument="to")
        self.connected.add(peer.session)

    def disconnect(self, peer: int) -> None:
        """See :class:`hal_core.handover.Wire`."""
        self.connected.discard(peer)

    def renewed(self) -> Iterable[int]:
        """See :class:`hal_core.handover.Wire`."""
        again, self.again = self.again, set()
        return again

    def send(self, peer: int, message: bytes) -> bool:
        """See :class:`hal_core.handover.Wire`."""
        return peer in self.connected and self._give(peer, message)

    def reply(self, peer: int, message: bytes) -> bool:
        """See :class:`hal_core.handover.Wire`."""
        return self._give(peer, message)

    def _give(self, peer: int, message: bytes) -> bool:
        if not self.room or (target := self.net.wires.get(peer)) is None:
            return False
        self.net.sent += 1
        target.inbox.extend(self.net.deliver(self.session, peer, message))
        return True

    def receive(self) -> Iterable[bytes]:
        """See :class:`hal_core.handover.Wire`."""
        while self.inbox:
            yield self.inbox.popleft()

    @property
    def sockets(self) -> Sequence[int]:
        """Return no sockets."""
        return ()

    def close(self) -> None:
        """See :class:`hal_core.handover.Wire`."""
        self.net.wires.pop(self.session, None)
