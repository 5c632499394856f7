"""How plans and values reach a Paddle place: one upload, then at most one in-place scatter for each element width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plan import WRITE, WritePlan, apply_to_host
from ..tickets import DONE, Ticket
from .memory import WORD, Bytes, PaddleMemory, Tensor
from .packing import WIDTHS, Elements, SpreadColumns, elements, in_pieces

if TYPE_CHECKING:
    from ..device import Stream
    from ..staging import Span
    from .device import PaddleDevice

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Place = tuple[int, int, int, int]
"""Of the elements of one width: the width, their number, and where in the span their indices and values begin."""
MANY = 1 << 31
"""Elements beyond which an index needs 8 bytes."""


class Writer:
    """Submits write plans and contiguous values for one device."""

    def __init__(self, device: PaddleDevice) -> None:
        self._device = device
        self._columns: dict[tuple[int, int, int], SpreadColumns] = {}

    def put(self, memory: PaddleMemory, offset: int, data: Bytes, stream: Stream) -> Ticket:
        """Upload contiguous bytes straight to where they belong; more than the ring holds go in pieces."""
        ticket: Ticket = DONE
        limit = self._device.staging.limit
        for at in range(0, data.nbytes, limit):
            part = data[at : at + limit]
            span = self._device.staging.take(part.nbytes)
            span.buffer[...] = part
            ticket = self._send(span, stream, memory, memory.bytes(offset + at, part.nbytes))
        return ticket

    def submit(self, plan: WritePlan, stream: Stream, widest: int = WORD) -> Ticket:
        """Write a plan. ``widest``: the widest element to use, where all targets are of one type."""
        memory = plan.memory
        assert isinstance(memory, PaddleMemory)
        single = _one_run(plan)
        if single is not None:
            return self.put(memory, *single, stream)
        ticket: Ticket = DONE
        for part in in_pieces(plan, self._device.staging.limit // 16):  # a byte may need 9 more for its index
            ticket = self._scatter(part, memory, min(widest, memory.unit), stream)
        return ticket

    def place(self, memory: PaddleMemory, indices: Ints, values: Tensor, width: int, stream: Stream) -> Ticket:
        """Scatter a device tensor of elements of ``width`` bytes to the elements named by host ``indices``."""
        span = self._device.staging.take(indices.nbytes)
        span.buffer[...] = indices.reshape(-1).view(np.uint8)
        mirror = span.segment.block.mirror  # type: ignore[attr-defined]  # a PaddleBlock
        where = mirror.typed("int64")[span.begin // WORD : (span.begin + span.nbytes) // WORD]
        scatter = self._device.scatters[width]

        def launch() -> None:
            scatter.put(memory.typed(scatter.dtype), where, values)
            self._launched()

        return self._send(span, stream, memory, mirror.bytes(span.begin, span.nbytes), launch)

    def _scatter(self, plan: WritePlan, memory: PaddleMemory, widest: int, stream: Stream) -> Ticket:
        found = elements(plan, memory.begin, widest, self._spread(plan, memory, widest))
        missing = [found.pop(width) for width in WIDTHS if width in found and width not in self._device.scatters]
        if missing and memory.unit < WORD:
            return self._rewrite(plan, memory, stream)
        if missing:
            merged = self._merged(missing, memory, stream)
            words = found.setdefault(WORD, Elements(WORD))
            words.add(*merged)
        index = np.dtype(np.int32 if memory.begin + memory.nbytes < MANY else np.int64)
        parts, at = [], 0
        for width in WIDTHS:  # the widest first: a merged word may hold old bytes that a narrower one replaces
            if width in found:
                count = found[width].count
                values = at + _up(count * index.itemsize)
                parts.append((found[width], at, values))
                at = values + _up(count * width)
        span = self._device.staging.take(at)
        try:
            for part, index_at, value_at in parts:
                indices = span.buffer[index_at : index_at + part.count * index.itemsize].view(index)
                part.fill(indices, span.buffer[value_at : value_at + part.count * part.width])
        except BaseException:
            self._device.staging.drop(span)
            raise
        places = [(part.width, part.count, index_at, value_at) for part, index_at, value_at in parts]
        mirror = span.segment.block.mirror  # type: ignore[attr-defined]  # a PaddleBlock
        launch = partial(self._launch, mirror, span.begin, memory, index, places)
        return self._send(span, stream, memory, mirror.bytes(span.begin, at), launch)

    def _send(
        self,
        span: Span,
        stream: Stream,
        memory: PaddleMemory,
        target: Tensor,
        launch: Callable[[], None] | None = None,
    ) -> Ticket:
        """One upload of the span to ``target`` and what is launched after it; then the span's fence."""
        device, block = self._device, span.segment.block
        source = block.host[span.begin : span.begin + span.nbytes]  # type: ignore[attr-defined]  # a PaddleBlock
        device.before_write(memory, stream)
        try:
            with device.current(stream):
                target.copy_(source, device.blocking)
                device.count("uploads")
                device.count("submissions")
                if launch is not None:
                    launch()
        finally:
            event, ticket = device.after_work(stream, memory)
            device.staging.fence(span, event)
        return ticket

    def _launch(
        self,
        mirror: PaddleMemory,
        begin: int,
        memory: PaddleMemory,
        index: np.dtype[Any],
        places: Sequence[Place],
    ) -> None:
        """One scatter for each width, from the uploaded span at ``begin`` of the mirror."""
        for width, count, index_at, value_at in places:
            scatter = self._device.scatters[width]
            first, value = (begin + index_at) // index.itemsize, (begin + value_at) // width
            indices = mirror.typed(index.name)[first : first + count]
            values = mirror.typed(scatter.dtype)[value : value + count]
            scatter.put(memory.typed(scatter.dtype), indices, values)
            self._launched()

    def _launched(self) -> None:
        self._device.count("launches")
        self._device.count("submissions")

    def _merged(self, missing: list[Elements], memory: PaddleMemory, stream: Stream) -> tuple[Ints, list[Any]]:
        """Elements too narrow for this place as whole words, with what the words hold besides; waits for the device."""
        places = [np.concatenate([piece.reshape(-1) for piece in part.indices]) * part.width for part in missing]
        words = np.unique(np.concatenate(places) // WORD)
        low, count = int(words[0]), int(words[-1] - words[0]) + 1
        window = np.empty(count * WORD, np.uint8)
        self._device.read_now(memory.typed("uint8")[low * WORD : (low + count) * WORD], window, stream)
        for part, at in zip(missing, places, strict=True):
            values = np.frombuffer(b"".join(part.values), np.uint8).reshape(-1, part.width)
            window[(at - low * WORD)[:, None] + np.arange(part.width)] = values
        return words, [window.view(np.int64)[words - low].tobytes()]

    def _rewrite(self, plan: WritePlan, memory: PaddleMemory, stream: Stream) -> Ticket:
        """The same for the memory of a tensor, which need not be whole words: its bytes read, changed, written back."""
        low = int(plan.writes["dst"].min())
        high = int((plan.writes["dst"] + plan.writes["nbytes"]).max())
        window = np.empty(high - low, np.uint8)
        self._device.read_now(memory.bytes(low, high - low), window, stream)
        writes = plan.writes.copy()
        writes["dst"] -= np.uint64(low)
        apply_to_host(WritePlan(memory, writes, (plan.payload,)), window)
        return self.put(memory, low, window, stream)

    def _spread(self, plan: WritePlan, memory: PaddleMemory, widest: int) -> SpreadColumns | None:
        if plan.records is None:
            return None
        key = id(plan.records.spread), memory.begin, widest
        found = self._columns.get(key)
        if found is None:
            found = self._columns[key] = SpreadColumns(plan.records.spread, memory.begin, widest)
        return found


def _one_run(plan: WritePlan) -> tuple[int, Bytes] | None:
    """``(offset, bytes)`` of a plan that writes one run and nothing else."""
    if plan.records is not None or len(plan.writes) != 1:
        return None
    offset, source, nbytes, pattern = plan.writes[0].tolist()
    if pattern == 0:
        return offset, plan.payload[source : source + nbytes]
    data = np.zeros(nbytes, np.uint8)
    row = np.array([(0, source, nbytes, pattern)], WRITE)
    apply_to_host(WritePlan(plan.memory, row, ()), data)
    return offset, data


def _up(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD
