"""A free port for a store that Paddle opens: chosen here, and bound by Paddle later or in another process."""

from __future__ import annotations

import socket
from typing import Self


class HeldPort:
    """A free port of this host, reserved until closed. A context manager.

    A socket is bound to it, on every address, and does not listen. The port therefore counts as used, and only sockets
    with SO_REUSEADDR that ask for this very port can bind it, as Paddle's stores do.

    - ``number``: the port.
    """

    def __init__(self, host: str = "") -> None:
        """``host``: an address whose family is used, IPv4 by default."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port; a process that has bound it keeps it. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
