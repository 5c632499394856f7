"""Staging memory: a host block that uploads read, and a device block of the same size that scatters read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .paddle_memory import WORD, Bytes, PaddleMemory, Tensor, empty_words, host_tensor


class PaddleBlock:
    """One allocation of the staging ring (:class:`hal_core.devices.StagingRing`'s ``Block``).

    The host part is hal's own pageable memory. Paddle keeps no source alive, and a driver may read pageable memory only
    when the copy runs, so a span is written again only once the event after its last use has passed.
    """

    __slots__ = ("address", "buffer", "host", "mirror")

    def __init__(self, place: Any, nbytes: int) -> None:  # noqa: ANN401 (a Paddle place)
        self.buffer: Bytes = np.empty(-(-nbytes // WORD), np.int64).view(np.uint8)
        self.address = int(self.buffer.ctypes.data)
        self.host: Tensor = host_tensor(self.buffer)
        self.mirror = PaddleMemory(None, empty_words(place, nbytes), 0, self.buffer.nbytes, WORD)

    def release(self) -> None:
        """Return at once: Python and Paddle free both parts once they are unreferenced."""
