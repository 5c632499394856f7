"""The readiness of a server: it listens, and its engine takes requests. A person and systemd are sent a line then."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

SOCKET = "NOTIFY_SOCKET"
"""Variable with the socket of a service manager (sd_notify(3)): a path, or "@" and an abstract name."""


class Readiness:
    """Prints one line, and notifies the service manager, once both parts are there."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._address, self._opened = say, "", False

    def listening(self, address: str) -> None:
        """The server takes connections at ``address``."""
        self._address = address
        self._announce()

    def opened(self) -> None:
        """The engine takes requests."""
        self._opened = True
        self._announce()

    def stopping(self) -> None:
        """The drain begins."""
        self._notify("STOPPING=1")

    def _announce(self) -> None:
        if self._address and self._opened:
            self._say(f"hal: ready on {self._address}")
            self._notify(f"READY=1\nSTATUS=ready on {self._address}")

    def _notify(self, message: str) -> None:
        if not (path := os.environ.get(SOCKET, "")):
            return
        address = "\0" + path[1:] if path.startswith("@") else path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(address)
                sender.sendall(message.encode())
        except OSError as error:
            self._say(f"hal: {SOCKET}={path}: {error.strerror}; the service manager was not notified")
