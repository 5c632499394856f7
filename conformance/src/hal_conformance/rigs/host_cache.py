"""Blocks in host memory: a :class:`BlockCache` over one NumPy array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hal_core.errors import InvalidValue
from hal_core.tickets import DONE, Ticket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class HostCache:
    """``data``, uint8 ``[blocks, block_bytes]``, belongs to the caller; it is read and written in place."""

    def __init__(self, data: Bytes, facts: Mapping[str, str]) -> None:
        if data.dtype != np.uint8 or data.ndim != 2:
            raise InvalidValue(f"{data.dtype}{list(data.shape)}", cure="give uint8 [blocks, bytes]", argument="data")
        self.data, self._facts = data, dict(facts)
        self.blocks, self.block_bytes = data.shape

    def facts(self) -> Mapping[str, str]:
        """Return the given facts."""
        return self._facts

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`hal_core.handover.BlockCache`."""
        return self.data[list(blocks)]

    def write(self, blocks: Sequence[int], data: Bytes) -> Ticket:
        """See :class:`hal_core.handover.BlockCache`."""
        self.data[list(blocks)] = data
        return DONE
