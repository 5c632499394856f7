"""The writes that the tensors of one worker have applied and that are not submitted yet.

What one step applies goes out together: one ``device.write``, so one upload and one launch where the device has them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from hal_core import DONE, InvalidValue, Ticket, Writes
from hal_core.devices import Memory, PlanBuilder, WritePlan

if TYPE_CHECKING:
    from hal_core import BoundDevice, View

CHUNK = 1 << 20
"""Bytes of the blocks that small tensors share, so that a step's writes to all of them are one plan."""
ALIGNMENT = 256
"""Bytes. vLLM's kernels take addresses of tensors as multiples of 16."""


class Rows:
    """Runs of elements that go to one tensor: ``dst`` and ``nbytes`` of each, and the bytes of all.

    ``overlapping``: two runs may share bytes, and then the later one wins.
    """

    __slots__ = ("dst", "nbytes", "overlapping", "pieces")

    def __init__(self) -> None:
        self.dst: list[int] = []
        self.nbytes: list[int] = []
        self.pieces: list[bytes | memoryview] = []
        self.overlapping = False


class Place:
    """Where a tensor lies: its memory, and its offset there in bytes. ``rows``: what was applied and is pending."""

    __slots__ = ("memory", "offset", "rows")

    def __init__(self, memory: Memory, offset: int) -> None:
        self.memory, self.offset = memory, offset
        self.rows: Rows | None = None


class StepWrites(Writes):
    """The pending rows of all tensors, for one ``device.write``."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__()
        self._places = places

    def plans(self) -> list[WritePlan]:
        """Return one plan for each memory. Distinct tensors never overlap."""
        together: dict[int, list[Place]] = {}
        for place in self._places:
            together.setdefault(id(place.memory), []).append(place)
        return [self._plan(places) for places in together.values()]

    def _plan(self, places: list[Place]) -> WritePlan:
        dst: list[int] = []
        nbytes: list[int] = []
        pieces: list[bytes | memoryview] = []
        overlapping = False
        for place in places:
            rows = place.rows
            assert rows is not None
            dst += rows.dst
            nbytes += rows.nbytes
            pieces += rows.pieces
            overlapping |= rows.overlapping
        builder = PlanBuilder(places[0].memory)
        builder.runs(np.array(dst, np.int64), np.array(nbytes, np.int64), pieces)
        return builder.build(inside=True, disjoint=not overlapping)


class Stage:
    """A hal device whose memory torch's tensors lie in, and the writes to them.

    ``opener`` returns the device over a device of torch. ``tensors``: that of the tensors, with a number or without.
    ``uva``: vLLM's own class keeps the tensors that it wants in pinned host memory.
    """

    def __init__(
        self, opener: Callable[[torch.device], BoundDevice], tensors: torch.device, *, uva: bool = False
    ) -> None:
        self.opener, self.tensors, self.uva = opener, tensors, uva
        self.counts: Counter[str] = Counter()
        self.pending: list[Place] = []
        self._device: BoundDevice | None = None
        self._chunk: torch.Tensor | None = None
        self._view: View | None = None
        self._used = 0
        if tensors.type == "cpu" or tensors.index is not None:
            self.open()

    @property
    def device(self) -> BoundDevice:
        """The hal device: opened with the first tensor, as a worker's own chip is not known before."""
        return self._device or self.open()

    def open(self) -> BoundDevice:
        """Open the hal device of torch's current device.

        :raises InvalidValue: if torch's tensors do not lie in its memory; it is closed again.
        """
        kind = self.tensors.type
        if kind != "cpu" and self.tensors.index is None:
            self.tensors = torch.device(kind, torch.get_device_module(kind).current_device())
        device = self._device = self.opener(self.tensors)
        try:
            self._check_shared()
        except BaseException:
            self._device, self._chunk, self.pending = None, None, []
            device.close()
            raise
        return device

    def _check_shared(self) -> None:
        """Write through hal and read with torch. Raises :class:`InvalidValue` if they do not see the same memory."""
        who, cure = self.device.name, f"give in HAL_VLLM_DEVICE a hal device over torch's {self.tensors.type}"
        try:
            tensor, place = self.allocate((4,), torch.int32)
        except InvalidValue as error:
            what = f"a torch tensor on {self.tensors} does not lie in its memory: {error.what}"
            raise InvalidValue(what, cure=cure, device=who) from error
        rows = Rows()
        rows.dst, rows.nbytes, rows.pieces = [place.offset + 4], [8], [np.array([3, -7], np.int32).tobytes()]
        self.add(place, rows)
        self.flush().wait()
        if tensor.tolist() != [0, 3, -7, 0]:
            what = f"torch reads {tensor.tolist()} on {self.tensors} where it wrote [0, 3, -7, 0]"
            raise InvalidValue(what, cure=cure, device=who)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Place]:
        """Return a tensor of zeros, and its place. Its address never changes.

        :raises InvalidValue: if the hal device cannot hold torch's tensors.
        """
        resolve = self.device.device.resolve  # opened before anything is allocated, as opening allocates too
        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if room > CHUNK // 4:
            tensor = torch.zeros(room, dtype=torch.uint8, device=self.tensors)
            view, at = resolve(tensor), 0
        else:
            if self._chunk is None or self._used + room > CHUNK:
                self._chunk, self._used = torch.zeros(CHUNK, dtype=torch.uint8, device=self.tensors), 0
                self._view = resolve(self._chunk)
            assert self._view is not None
            tensor, view, at = self._chunk, self._view, self._used
            self._used += room
        part = tensor[at : at + math.prod(shape) * dtype.itemsize]
        return part.view(dtype).view(tuple(shape)), Place(view.memory, view.offset + at)

    def add(self, place: Place, rows: Rows) -> None:
        """Take rows for the next submission, after those that the tensor has pending."""
        pending = place.rows
        if pending is None:
            place.rows = rows
            self.pending.append(place)
            return
        pending.dst += rows.dst
        pending.nbytes += rows.nbytes
        pending.pieces += rows.pieces
        pending.overlapping = True

    def flush(self) -> Ticket:
        """Submit what was applied, in the order of the stream on which torch computes, and return the ticket.

        :raises InvalidValue: while that stream is being captured into a graph; nothing is lost.
        """
        if not self.pending:
            return DONE
        if self.tensors.type != "cpu" and _capturing(self.tensors):
            what = "staged writes of slot state are pending while a graph is captured"
            cure = "apply and read them once before the capture, as GPUModelRunner.capture_model does over hal"
            raise InvalidValue(what, cure=cure, device=self.device.name)
        places = self.pending
        ticket = self.device.write(writes=StepWrites(places), stream=self.device.default_stream)
        self.pending = []
        for place in places:
            place.rows = None
        self.counts["submissions"] += 1
        self.counts["tensors"] += len(places)
        return ticket


def _capturing(device: torch.device) -> bool:
    captures = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    return captures is not None and bool(captures())
