"""The ticket of a copy out, which holds the copied bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..tickets import DoneTicket, Ticket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CopyTicket(Ticket):
    """The ticket of ``copy_out``. ``data`` may be read once the ticket is done; the arrays stay valid and unchanged."""

    __slots__ = ()

    @property
    @abstractmethod
    def data(self) -> Sequence[Bytes]:
        """One uint8 array for each requested range, in that order."""

    def first_bytes(self) -> bytes:
        """Return the bytes of the first range, once the ticket is done; for a few bytes that are compared and then
        dropped."""
        return self.data[0].tobytes()

    def ahead(self) -> Sequence[Bytes] | None:
        """Return the arrays of ``data`` while the copy may be in flight, or None if they do not exist yet. They must
        not be read before the ticket is done and ``data`` was read."""
        return None


class HostCopy(DoneTicket, CopyTicket):
    """A copy that was complete when ``copy_out`` returned."""

    __slots__ = ("_data",)

    def __init__(self, data: Sequence[Bytes]) -> None:
        super().__init__()
        self._data = data

    @property
    def data(self) -> Sequence[Bytes]:
        return self._data
