"""Concurrent streams: the used one, the held ones, and a call between other work of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from hal_core.memory.views import ByteRange

from ..harness import backdoor
from ..harness.backdoor import arrive
from ..harness.bits import noise
from ..kit import Kit
from .forms import Road, unlike

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

HELD = ("a stream of its own, held", "the default stream, held")
FREE = ("a new stream while the other ones are held", "the default stream while other ones are held")


def copied(kit: Kit, memory: Memory, stream: Stream) -> CopyTicket:
    """Start a copy of all bytes, without waiting."""
    return kit.device.copy_out(memory, [ByteRange(0, memory.nbytes)], stream)


def pairs(kit: Kit) -> list[tuple[str, Stream, Stream]]:
    """Return pairs of streams: the default one in either place, and in neither."""
    device = kit.device
    return [
        ("the default stream and another", device.default_stream, device.stream()),
        ("another stream and the default one", device.stream(), device.default_stream),
        ("two others", device.stream(), device.stream()),
    ]


class Busy:
    """Work on a stream that a test holds: it must be right in the end, and no other work may wait for it."""

    def __init__(self, kit: Kit, stream: Stream, seed: int) -> None:
        self.kit, self.should = kit, noise(seed, 4096)
        self.memory = kit.device.allocate(4096)
        self.written = backdoor.put(kit.device, self.memory, [(0, self.should.tobytes())], stream)
        self.copy = copied(kit, self.memory, stream)

    def check(self) -> None:
        """Assert that the work on the held stream was done after its release."""
        __tracebackhide__ = True
        arrive(self.written)
        arrive(self.copy)
        wrong = unlike(self.copy.data[0], self.should)
        assert not wrong, f"work on a stream that was held: {wrong}"


@contextmanager
def beside(kit: Kit, stream_case: str, what: str) -> Iterator[Stream]:
    """Yield the stream to use, with the streams named by ``stream_case`` held and work waiting on them. ``what`` is
    done within."""
    device = kit.device
    own, others = device.stream(), [device.default_stream, device.stream()]
    if "default stream" in stream_case:
        own, others = others[0], [own, others[1]]
    if stream_case in HELD:
        with kit.held(own, what):
            yield own
        return
    busy: list[Busy] = []
    with ExitStack() as stack:
        for seed, other in enumerate(others):
            stack.enter_context(kit.held(other, f"{what} (or a wait for it, or for a copy after it)"))
            busy.append(Busy(kit, other, seed))
        yield own
    for each in busy:
        each.check()


class Between:
    """A call between other work of its stream, without waits: each must see only the work before it.

    On the stream, in this order: irrelevant bytes, the bytes that must be there first, a copy, **the call**, a copy,
    another stream that waits for an event and copies, and bytes that overwrite everything.
    """

    def __init__(self, kit: Kit, road: Road, stream: Stream) -> None:
        device, memory = kit.device, road.memory
        nbytes = road.before.nbytes
        self.road, self.nbytes, self.last = road, nbytes, noise(99, nbytes)
        backdoor.put(device, memory, [(0, (~road.before).tobytes())], stream)
        backdoor.put(device, memory, [(0, road.before.tobytes())], stream)
        for source, data in road.sources:
            backdoor.put(device, source, [(0, data.tobytes())], stream)
        self.first = copied(kit, memory, stream)
        self.ticket: Ticket = road.act(stream)
        self.second = copied(kit, memory, stream)
        aside = device.stream()
        aside.wait(device.event(stream))
        self.aside = copied(kit, memory, aside)
        stream.wait(device.event(aside))
        for source, data in road.sources:
            backdoor.put(device, source, [(0, (~data).tobytes())], stream)
        self.end = backdoor.put(device, memory, [(0, self.last.tobytes())], stream)
        self.third = copied(kit, memory, stream)

    @property
    def copies(self) -> tuple[CopyTicket, ...]:
        """Return all copies that were made."""
        return self.first, self.second, self.aside, self.third

    def check(self, told: str) -> None:
        """Wait for everything, and compare."""
        __tracebackhide__ = True
        for copy in (*self.copies,):
            arrive(copy)
        first, second, aside, third = (copy.data[0][: self.nbytes] for copy in self.copies)
        for when, wrong in (
            ("before it", unlike(first, self.road.before)),
            ("after it", self.road.wrong(second)),
            ("on another stream that waited for its event", unlike(aside, second)),
            ("after the work that followed it", unlike(third, self.last)),
        ):
            assert not wrong, f"{told}: the copy made {when}: {wrong}"
        self.road.complete(self.ticket)
        assert self.ticket.done(), f"{told}: its ticket was waited for, but is not done"
