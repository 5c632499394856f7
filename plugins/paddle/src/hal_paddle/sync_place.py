"""The synchronous device of Paddle: each call's work is done when it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hal_core import DONE, Ticket
from hal_core.devices import PASSED, CopyTicket, HostCopy, SyncDevice

from .paddle_memory import Bytes, PaddleMemory, Tensor, host_tensor
from .place import PaddlePlace

if TYPE_CHECKING:
    from hal_core import ByteRange, Capabilities, Event, Stream
    from hal_core.devices import Memory


class PaddleDevice(PaddlePlace, SyncDevice):
    """One synchronous place: each call's work is done when it returns. A subclass sets ``name``."""

    blocking: ClassVar[bool] = True

    def __init__(self, index: int, place: Any, options: Mapping[str, object], capabilities: Capabilities) -> None:  # noqa: ANN401
        super().__init__(index)
        self.open_place(place, options, capabilities)

    def current(self, stream: Stream) -> AbstractContextManager[None]:
        """Return an empty context: there is only one order."""
        return nullcontext()

    def before_write(self, memory: Memory, stream: Stream) -> None:
        """Return at once: reads of the memory are done."""

    def after_work(self, stream: Stream, keep: object) -> tuple[Event, Ticket]:
        """Wait for the place."""
        self.synchronize()
        return PASSED, DONE

    def read_now(self, source: Tensor, target: Bytes, stream: Stream) -> None:
        """Copy and wait."""
        self.count("copies_out")
        self.count("host_waits")
        host_tensor(target).copy_(source, True)

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges; the copies are complete on return."""
        self.check_open()
        assert isinstance(memory, PaddleMemory)
        found = [np.empty(part.nbytes, np.uint8) for part in parts]
        for part, data in zip(parts, found, strict=True):
            if part.nbytes:
                host_tensor(data).copy_(memory.bytes(part.offset, part.nbytes), True)
        self.count("copies_out", len(parts))
        return HostCopy(found)

    def close(self) -> None:
        """Wait for the staging ring, then drop all references; memory lives as long as its users."""
        if not self._closed:
            super().close()
            self.staging.close()
