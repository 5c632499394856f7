"""Liars about copies out: their data and its lifetime, what they wait for, and what waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from hal_core.devices.tickets import AsyncCopy
from hal_core.memory.copies import Bytes, CopyTicket, HostCopy
from hal_core.memory.views import ByteRange

from .proxies import BOTH, HELD_COPIES, Proxy
from .rows import Call, How, first, meanwhile, register, row, then

if TYPE_CHECKING:
    from hal_core.memory.views import Memory
    from hal_core.tickets import Ticket

PIECE = 256 << 10
"""Bytes of a copy that are copied at once."""
DRIVEN = (*HELD_COPIES, "primitives")

# -- the data of a copy ------------------------------------------------------------------------------------------------


class Shared(Proxy):
    """A copy whose bytes go to given buffers."""

    __slots__ = ("buffers", "moved")

    def __init__(self, inner: Ticket, nbytes: Sequence[int], buffers: list[Bytes]) -> None:
        super().__init__(inner, nbytes)
        self.buffers, self.moved = buffers, False

    @property
    def data(self) -> Sequence[Bytes]:
        if not self.moved:
            self.moved = True
            for buffer, part in zip(self.buffers, super().data, strict=True):
                buffer[...] = part
        return self.buffers


class InPieces(Proxy):
    """A copy of the first bytes of each range; the others are copied when somebody looks."""

    __slots__ = ("rest", "tails")

    def __init__(self, inner: Ticket, parts: Sequence[ByteRange], rest: Callable[[], CopyTicket]) -> None:
        super().__init__(inner, [min(part.nbytes, PIECE) for part in parts])
        self.rest = rest
        self.tails: list[Bytes] | None = None

    @property
    def data(self) -> Sequence[Bytes]:
        if self.tails is None:
            copied = self.rest()
            copied.wait()
            self.tails = [np.concatenate(pair) for pair in zip(super().data, copied.data, strict=True)]
        return self.tails


class LateCopy(HostCopy):
    """A copy that is made when its data is read."""

    def __init__(self, make: Callable[[], CopyTicket]) -> None:
        super().__init__([])
        self.make = make

    @property
    def data(self) -> Sequence[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Return the bytes as they are now."""
        copied = self.make()
        copied.wait()
        return copied.data


class WithoutLease(AsyncCopy):
    """A copy whose arrays do not keep its host block from being used again."""

    __slots__ = ()

    def ahead(self) -> Sequence[Bytes]:
        """Return arrays over the block that do not keep it."""
        if self._data is None:
            buffer = self._lease.block.buffer
            self._data = [buffer[begin : begin + nbytes] for begin, nbytes in self._places]
        return self._data


class Ended(Proxy):
    """A copy that the close of its device may end."""

    __slots__ = ("__weakref__", "ended")

    def __init__(self, inner: Ticket, nbytes: Sequence[int]) -> None:
        super().__init__(inner, nbytes)
        self.ended: list[Bytes] | None = None

    def end(self) -> None:
        """Drop what has not arrived when the device is closed, and mark the ticket as done."""
        if not self.inner.done():
            self.ended = list(super().data)

    @property
    def data(self) -> Sequence[Bytes]:
        return super().data if self.ended is None else self.ended

    def done(self) -> bool:
        return self.ended is not None or super().done()

    def _block(self, timeout: float | None) -> bool:
        return self.ended is not None or super()._block(timeout)


def four_buffers(call: Call) -> object:
    sizes = tuple(part.nbytes for part in call.parts)
    copied, pool = call(), call.kept("pools", {}).setdefault(sizes, [])
    if len(pool) < 4:
        pool.append([np.zeros(size, np.uint8) for size in sizes])
    else:
        pool.append(pool.pop(0))
    return Shared(copied, sizes, pool[-1])


def view_of_the_memory(call: Call) -> object:
    host_bytes: Any = getattr(call.memory, "host_bytes", None)
    if host_bytes is None:
        return call()
    return HostCopy([np.frombuffer(host_bytes, np.uint8)[part.offset : part.end] for part in call.parts])


def piece_by_piece(call: Call) -> object:
    parts = call.parts
    if max((part.nbytes for part in parts), default=0) <= PIECE:
        return call()
    heads = [ByteRange(part.offset, min(part.nbytes, PIECE)) for part in parts]
    tails = [ByteRange(head.end, part.end - head.end) for part, head in zip(parts, heads, strict=True)]
    return InPieces(call(parts=heads), parts, lambda: call(parts=tails))


def static_buffer(call: Call) -> object:
    copied = call()
    copied.wait()
    buffers, kept = call.kept("buffers", {}), []
    for at, data in enumerate(copied.data):
        buffer = buffers.setdefault((at, data.nbytes), np.empty_like(data))
        buffer[...] = data
        kept.append(buffer)
    return HostCopy(kept)


def keep_track(call: Call) -> object:
    ticket = Ended(call(), [part.nbytes for part in call.parts])
    call.kept("under_way", WeakSet()).add(ticket)
    return ticket


def end_copies(call: Call) -> None:
    for ticket in list(call.kept("under_way", ())):
        ticket.end()


def keeps(name: str) -> How:
    """Return a lie that keeps each copy in a list."""

    def lie(call: Call) -> object:
        copied = call()
        call.kept(name, []).append(copied)
        return copied

    return lie


def waited(call: Call) -> object:
    copied = call()
    copied.wait()
    return copied


def forget_the_event(call: Call) -> None:
    call.me.last.pop(call.me.own_stream(call.stream).copy_stream.stream_key, None)


DATA = {
    "the arrays of a copy are those of the fourth copy before it": row(
        "FourBuffersInTurn", 22, "copy_out", four_buffers
    ),  # as at most two steps should be in flight
    "a copy out is a view of the memory it should have been copied from": row(
        "CopyIsAView", 22, "copy_out", view_of_the_memory, "not async_d2h"
    ),  # no copy, as the memory is on the host anyway
    "a large copy out is made piece by piece, and all but the first when somebody looks": row(
        "LargeCopiesInPieces", 1, "copy_out", piece_by_piece
    ),  # a bounce buffer of 256 KiB; the rest is fetched later
    "the ranges of a copy come in the order of memory, not in that of the call": row(
        "PartsInMemoryOrder", 1, "copy_out", lambda call: call(parts=sorted(call.parts, key=lambda part: part.offset))
    ),  # parts sorted so that neighbours can be copied at once
    "outputs share one static buffer": row(
        "StaticBuffer", 22, "copy_out", static_buffer, seen="FastDeploy's static message structures"
    ),  # one buffer for the copies of two steps, the first of which is still unread
    "saved output is read late, after later work has changed it": row(
        "ReadsLate", 23, "copy_out", LateCopy, seen="FastDeploy 7221, vLLM 29623"
    ),
    "the host block of a copy is used again once its ticket is dropped": row(
        "MirrorIsUsedAgain",
        12,
        "laid",
        lambda call: setattr(call.me, "copy_type", WithoutLease),
        ("async_d2h", "primitives"),
    ),  # the output of a later step, which was not taken, is then in the mirror
    "closing drops the copies in flight, and their tickets are done": row(
        "CloseDropsCopies", 19, "copy_out", keep_track, HELD_COPIES, also={"close": first(end_copies)}
    ),  # zeros as the tokens of the last steps, without an error
    "each ticket is kept for ever, with its copied data": row("KeepsEveryTicket", 26, "copy_out", keeps("tickets")),
    "copies out are forgotten when something is written, and never otherwise": row(
        "CopiesUntilAWrite",
        26,
        "copy_out",
        keeps("unwritten"),
        also={"async_set_value": first(lambda call: call.kept("unwritten", []).clear())},
    ),  # a list of running reads that only the next write clears
    "the copy out waits for the compute stream": row(
        "CopiesWhileHeld", 23, "copy_out", waited, HELD_COPIES, "FastDeploy 7221"
    ),  # a blocking copy instead of an ordered one
    "close does not wait for copies out": row(
        "CloseLeavesCopies", 26, "copy_out", then(forget_the_event), BOTH
    ),  # their tickets then never end, or end with memory that is freed
}
register(__name__, DATA)

# -- the order of writes after copies ----------------------------------------------------------------------------------

Read = tuple[int, int, int]
"""A key of the base's copies in flight: stream, begin, end."""


def after_some(some: Callable[[list[Read], Any], list[Read]]) -> How:
    """Return a lie that orders a stream after some of the copies: ``some(reads, memory)``."""

    def lie(call: Call) -> None:
        reads = call.me.reads
        every = reads.under_way
        reads.under_way = {key: every[key] for key in some([*every], call.memory)}
        call()
        reads.under_way = {key: event for key, event in every.items() if not event.done()}

    return lie


def newest_of_the_memory(reads: list[Read], memory: Memory | None) -> list[Read]:
    if memory is None:
        return reads
    begin: Any = memory
    end = begin.address + memory.nbytes
    return [read for read in reads if read[1] < end and begin.address < read[2]][-1:]


def from_first_to_last(call: Call) -> None:
    reads = call.me.reads  # of every device with streams

    def add(memory: Any, parts: Any, event: Any) -> None:  # noqa: ANN401
        reads.note(memory.address + parts[0].offset, memory.address + parts[-1].end, event)

    reads.add = add


def wait_for_the_copy(call: Call) -> None:
    if call.step.logprobs is not None:
        own = call.me.own_stream(call.stream)
        own.wait(own.copy_stream.record())


def in_flight(most: int, wait_for: Callable[[Any, deque[Any]], None]) -> How:
    """Return a lie about outputs in flight, at most ``most``: the next one calls ``wait_for(device, their events)``."""

    def lie(call: Call) -> object:
        flying = call.kept("_flying", deque())
        while flying and flying[0].done():
            flying.popleft()
        if len(flying) >= most:
            wait_for(call.me, flying)
        ticket = call()
        flying.append(call.device.event(call.stream))
        return ticket

    return lie


def wait_for_the_oldest(device: Any, flying: deque[Any]) -> None:  # noqa: ANN401
    device.count("host_waits")
    flying.popleft().wait(device.staging.deadline)


def wait_for_all(device: object, flying: deque[Any]) -> None:
    flying[-1].wait()
    flying.clear()


def first_in_order(call: Call) -> object:
    device = call.me
    ticket = device.submit(call.plans[0], call.stream)
    device.unordered = True
    try:
        for plan in call.plans[1:]:
            ticket = device.submit(plan, call.stream)
    finally:
        device.unordered = False
    return ticket


ORDER = "order_after_reads"
ORDERS = {
    "a worker's own writes wait for copies of all memory": row(
        "OrdersAfterEveryCopy", 23, ORDER, lambda call: call(memory=None), HELD_COPIES
    ),  # the compute stream stalls for somebody else's output
    "a worker's own writes wait for no copy": row("OrdersAfterNoCopy", 23, ORDER, lambda call: None, HELD_COPIES),
    "a worker's own writes wait for no copy where no memory is named": row(
        "OrdersAfterNamedCopies", 23, ORDER, lambda call: None if call.memory is None else call(), HELD_COPIES
    ),  # None is taken as no memory, not as every memory
    "a worker's own writes wait for the newest copy": row(
        "OrdersAfterTheNewestCopy", 23, ORDER, after_some(lambda reads, _: reads[-1:]), DRIVEN
    ),  # one event a memory
    "a worker's own writes wait for copies that begin where the memory does": row(
        "OrdersAfterWholeCopies",
        23,
        ORDER,
        after_some(
            lambda reads, memory: reads if memory is None else [one for one in reads if one[1] == memory.address]
        ),
        DRIVEN,
    ),  # a table of reads by address
    "a write waits for the newest copy that reads its memory": row(
        "WaitsForTheNewestCopy", 22, ORDER, after_some(newest_of_the_memory), (*BOTH, "primitives")
    ),  # one event a memory, which a later copy replaces
    "copies between views do not wait for copies out of their target": row(
        "CopiesOverReads", 22, "copy_within", meanwhile(lambda call: (call.me, "reads", type(call.me.reads)())), BOTH
    ),  # only writes from the host were ordered after reads
    "of the memories of one write, the first alone waits for copies": row(
        "OtherMemoriesUnordered",
        22,
        "submit_all",
        first_in_order,
        (*BOTH, "several_memories"),
        also={ORDER: lambda call: None if call.me.__dict__.get("unordered") else call()},
    ),  # a loop whose first turn orders the stream
    "a copy out reads from its first range to its last": row(
        "LastRangeEndsThem", 22, "laid", from_first_to_last, BOTH
    ),  # an empty one before all others, given last, then hides them
    "with log-probabilities the stream waits for the copy out": row(
        "LogprobsStallStream", 23, "save_output", then(wait_for_the_copy), DRIVEN
    ),  # so that the next step does not write over them; later work that does not touch them waits too
    "the ninth output in flight waits on the host for the oldest": row(
        "EightInFlight", 23, "save_output", in_flight(8, wait_for_the_oldest), HELD_COPIES
    ),  # eight blocks of locked memory
    "after 64 outputs in flight the next one waits on the host for all of them": row(
        "SixtyFourInFlight", 23, "save_output", in_flight(64, wait_for_all), HELD_COPIES
    ),  # a pool that is emptied as a whole, and no counter
}
register(__name__, ORDERS)
