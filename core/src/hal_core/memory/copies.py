"""What copies out return: a ticket that carries the bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..tickets import DoneTicket, Ticket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CopyTicket(Ticket):
    """A ticket of ``copy_out``. ``data`` may be read once the ticket is done; the arrays stay valid and unchanged."""

    __slots__ = ()

    @property
    @abstractmethod
    def data(self) -> Sequence[Bytes]:
        """One uint8 array for each range that was asked for, in that order."""

    def first_bytes(self) -> bytes:
        """The bytes of the first range, once the ticket is done; for a few that are compared and forgotten."""
        return self.data[0].tobytes()

    def ahead(self) -> Sequence[Bytes] | None:
        """The arrays of ``data`` while the copy may be under way: nobody reads them before it is done, and ``data`` was
        asked for. None where they are not there yet."""
        return None


class HostCopy(DoneTicket, CopyTicket):
    """A copy that was made when ``copy_out`` returned."""

    __slots__ = ("_data",)

    def __init__(self, data: Sequence[Bytes]) -> None:
        super().__init__()
        self._data = data

    @property
    def data(self) -> Sequence[Bytes]:
        return self._data
