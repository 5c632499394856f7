"""The connections of a reader's socket, as ZeroMQ's monitor tells of them."""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message


class Connections:
    """Which connections are there, by descriptor."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.monitor = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.there: set[int] = set()  #: as far as :meth:`broken` has been told

    def broken(self) -> Iterator[int]:
        """Take note of what came and went, and give those that went. Descriptors are reused, so the order counts."""
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.monitor, zmq.DONTWAIT)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.there.add(descriptor)
                continue
            self.there.discard(descriptor)
            yield descriptor

    def close(self) -> None:
        """Stop listening."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
