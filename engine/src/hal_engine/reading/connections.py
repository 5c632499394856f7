"""The connections of a reader's socket, as reported by ZeroMQ's monitor."""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

_REFUSED = {
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "it ended before it had said who it is",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "it does not speak ZeroMQ's protocol",
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "its key is not let in",
}
_OTHER_KEY = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)  # the second's value if nothing can be decrypted
_WATCHED = sum(_REFUSED) | int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_NAME = "inproc://connections"


class Connections:
    """Existing connections, by descriptor."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        socket.monitor(_NAME, _WATCHED)
        self.monitor = socket.context.socket(zmq.PAIR)
        self.monitor.rcvhwm = 0  # if it were full, it would block the thread that serves all connections
        self.monitor.connect(_NAME)
        self.there: set[int] = set()  #: as of the last call of :meth:`broken`
        self.refused: list[
            str
        ] = []  #: reasons of refused connections that were no sender's, so far; the caller removes them

    def broken(self) -> Iterator[int]:
        """Process the monitor's events, and yield closed connections. Descriptors are reused, so the order counts."""
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])  # for a failed handshake: the reason
            kind = int(event["event"])
            if kind in _REFUSED:
                self.refused.append("it uses another key" if descriptor == _OTHER_KEY else _REFUSED[kind])
            elif kind == zmq.EVENT_ACCEPTED:
                self.there.add(descriptor)
            else:
                self.there.discard(descriptor)
                yield descriptor

    def close(self) -> None:
        """Stop monitoring."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
