"""A port for a store that Paddle is to open: chosen here, and bound by Paddle, a little later or in another process."""

from __future__ import annotations

import socket
from typing import Self


class HeldPort:
    """A free port of this host, which nobody else is given until it is closed. A context manager.

    A socket is bound to it, on every address, and does not listen: so the port is no free one, and cannot be bound by
    others, but for those who reuse addresses (SO_REUSEADDR) and ask for that very port, as Paddle's stores do.

    - ``number``: the port.
    """

    def __init__(self, host: str = "") -> None:
        """``host``: an address of the family that it is for, IPv4 by default."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let go of it; who has bound it keeps it. A second time does nothing."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
