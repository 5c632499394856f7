"""Writing of plans and values to a Paddle place: one upload, then at most one in-place scatter for each element
width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from hal_core import DONE, Ticket
from hal_core.devices import WIDTHS, Elements, ScatterColumns, WritePlan, apply_to_host, elements, in_pieces, runs_of

from .paddle_memory import WORD, Bytes, PaddleMemory, Tensor

if TYPE_CHECKING:
    from hal_core import Stream
    from hal_core.devices import Span

    from .work import WorkingPlace

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Place = tuple[int, int, int, int]
"""The elements of one width: the width, their number, and the offsets of their indices and values in the span."""
MANY = 1 << 31
"""Number of elements beyond which an index needs 8 bytes."""


class Writer:
    """Submits write plans and contiguous values for one device."""

    def __init__(self, device: WorkingPlace) -> None:
        self._device = device
        # By memory, which a state owns, so that the entry is dropped with the state.
        self._columns: WeakKeyDictionary[PaddleMemory, dict[tuple[int, int], ScatterColumns]] = WeakKeyDictionary()

    def put(self, memory: PaddleMemory, offset: int, data: Bytes, stream: Stream) -> Ticket:
        """Upload contiguous bytes straight to their target; more than the ring holds goes through another block."""
        limit, target = self._device.staging.limit, memory.bytes(offset, data.nbytes)
        if data.nbytes <= limit:
            return self._send(self._filled(data.nbytes, partial(np.copyto, src=data)), stream, memory, target)
        room = PaddleMemory.allocate(self._device, self._device.place, data.nbytes)

        def move() -> None:
            target.copy_(room.bytes(0, data.nbytes), self._device.blocking)
            self._launched()

        for at in range(0, data.nbytes, limit):  # all data arrives before the target changes (G3)
            part = data[at : at + limit]
            last = move if at + limit >= data.nbytes else None
            span = self._filled(part.nbytes, partial(np.copyto, src=part))
            ticket = self._send(span, stream, memory, room.bytes(at, part.nbytes), last, keep=room)
        return ticket

    def _filled(self, nbytes: int, fill: Callable[[Bytes], None]) -> Span:
        """Return a span filled by ``fill``; release it if that fails."""
        span = self._device.staging.take(nbytes)
        try:
            fill(span.buffer)
        except BaseException:
            self._device.staging.drop(span)
            raise
        return span

    def submit(self, plan: WritePlan, stream: Stream, widest: int = WORD) -> Ticket:
        """Write a plan. ``widest``: the widest element to use, if all targets have one type."""
        memory = plan.memory
        assert isinstance(memory, PaddleMemory)
        single = _one_run(plan)
        if single is not None:
            return self.put(memory, *single, stream)
        widest = min(widest, memory.unit)
        pieces = [*in_pieces(plan, self._device.staging.limit // 16)]  # a byte may need 9 more for its index
        if len(pieces) > 1 and all(width in self._device.scatters for width in WIDTHS):
            return self._scatter_together(pieces, memory, widest, stream)
        ticket: Ticket = DONE
        for piece in pieces:  # One by one: a place without some widths reads bytes written by the previous piece.
            ticket = self._scatter(piece, memory, widest, stream)
        return ticket

    def place(self, memory: PaddleMemory, indices: Ints, values: Tensor, width: int, stream: Stream) -> Ticket:
        """Scatter a device tensor of elements of ``width`` bytes to the elements named by host ``indices``."""
        span = self._filled(indices.nbytes, partial(np.copyto, src=indices.reshape(-1).view(np.uint8)))
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
        packed = _Packed(found, memory)
        span = self._filled(packed.nbytes, packed.fill)
        mirror = span.segment.block.mirror  # type: ignore[attr-defined]  # a PaddleBlock
        launch = partial(self._launch, mirror, span.begin, memory, packed)
        return self._send(span, stream, memory, mirror.bytes(span.begin, packed.nbytes), launch)

    def _scatter_together(
        self, pieces: Sequence[WritePlan], memory: PaddleMemory, widest: int, stream: Stream
    ) -> Ticket:
        """Scatter a plan in pieces: each has its own block on the device, and the first is scattered once the last has
        arrived. So a ring that refuses a piece leaves the memory unchanged (G3, G8)."""
        rooms: list[PaddleMemory] = []
        launches: list[Callable[[], None]] = []
        ticket: Ticket = DONE
        for number, piece in enumerate(pieces, 1):
            packed = _Packed(elements(piece, memory.begin, widest, self._spread(piece, memory, widest)), memory)
            room = PaddleMemory.allocate(self._device, self._device.place, packed.nbytes)
            rooms.append(room)
            launches.append(partial(self._launch, room, room.begin, memory, packed))
            span = self._filled(packed.nbytes, packed.fill)
            last = partial(_call_all, launches) if number == len(pieces) else None
            ticket = self._send(span, stream, memory, room.bytes(0, packed.nbytes), last, keep=tuple(rooms))
        return ticket

    def _send(
        self,
        span: Span,
        stream: Stream,
        memory: PaddleMemory,
        target: Tensor,
        launch: Callable[[], None] | None = None,
        keep: object = None,
    ) -> Ticket:
        """Upload the span to ``target``, call ``launch`` after it, then fence the span.

        ``keep`` is kept alive besides ``memory`` until the work is done.
        """
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
            event, ticket = device.after_work(stream, (memory, keep))
            device.staging.fence(span, event)
        return ticket

    def _launch(self, mirror: PaddleMemory, begin: int, memory: PaddleMemory, packed: _Packed) -> None:
        """Scatter once for each width, from the upload at byte ``begin`` of the mirror's storage."""
        index = packed.index
        for width, count, index_at, value_at in packed.places:
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
        """Return elements too narrow for this place as whole words, with the other bytes of these words; waits for the
        device."""
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
        """Do the same for the memory of a tensor, which need not be whole words: read its bytes, change them, write
        them back."""
        low = int(plan.writes["dst"].min())
        high = int((plan.writes["dst"] + plan.writes["nbytes"]).max())
        window = np.empty(high - low, np.uint8)
        self._device.read_now(memory.bytes(low, high - low), window, stream)
        writes = plan.writes.copy()
        writes["dst"] -= np.uint64(low)
        apply_to_host(WritePlan(memory, writes, (plan.payload,)), window)
        return self.put(memory, low, window, stream)

    def _spread(self, plan: WritePlan, memory: PaddleMemory, widest: int) -> ScatterColumns | None:
        if plan.records is None:
            return None
        columns = self._columns.setdefault(memory, {})
        key = id(plan.records.scatter_map), widest
        found = columns.get(key)
        if found is None:
            found = columns[key] = ScatterColumns(plan.records.scatter_map, memory.begin, widest)
        return found


class _Packed:
    """Indices and values of a plan's elements in one block of ``nbytes``, the widest first: a merged word may hold old
    bytes that a narrower one replaces."""

    def __init__(self, found: dict[int, Elements], memory: PaddleMemory) -> None:
        self.index = np.dtype(np.int32 if memory.begin + memory.nbytes < MANY else np.int64)
        self._parts: list[tuple[Elements, int, int]] = []
        at = 0
        for width in WIDTHS:
            if width in found:
                count = found[width].count
                values = at + _up(count * self.index.itemsize)
                self._parts.append((found[width], at, values))
                at = values + _up(count * width)
        self.nbytes = at

    @property
    def places(self) -> list[Place]:
        """The offsets of the indices and values of each width."""
        return [(part.width, part.count, index_at, value_at) for part, index_at, value_at in self._parts]

    def fill(self, buffer: Bytes) -> None:
        """Write the block."""
        for part, index_at, value_at in self._parts:
            indices = buffer[index_at : index_at + part.count * self.index.itemsize].view(self.index)
            part.fill(indices, buffer[value_at : value_at + part.count * part.width])


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _one_run(plan: WritePlan) -> tuple[int, Bytes] | None:
    """Return ``(offset, bytes)`` of a plan with exactly one run."""
    if plan.records is not None or len(plan.writes) != 1:
        return None
    ((offset, data),) = runs_of(plan.writes, plan.payload)
    return offset, np.frombuffer(data, np.uint8)


def _up(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD
