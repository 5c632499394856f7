"""A small staging ring, and writes that fill it: each has its own target, so that a span reused too early is
noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hal_core.errors import OutOfMemory
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View

from ..harness.asserts import assert_says
from ..harness.backdoor import arrive
from ..harness.bits import noise
from ..kit import Kit
from .slab import Slab

if TYPE_CHECKING:
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

RING = 1 << 20
"""Bytes that the ring may hold."""
NEEDS = ("async_h2d", "can_hold_stream", "staging")
ENOUGH = 400
"""Writes after which a ring of that size must have refused one."""


@contextmanager
def pressed(kit: Kit) -> Iterator[Kit]:
    """Open another device, with a ring of 1 MiB and its usual deadline."""
    small = kit.another()
    small.device.staging.limit = RING  # type: ignore[attr-defined]  # the seam that `requires` asks for
    try:
        yield small
    finally:
        small.renew()


@contextmanager
def impatient(kit: Kit) -> Iterator[None]:
    """Make a full ring refuse at once, while a held stream keeps it full."""
    ring = kit.device.staging  # type: ignore[attr-defined]  # the same seam
    patience, ring.deadline = ring.deadline, 0.05
    try:
        yield
    finally:
        ring.deadline = patience


def refusal(kit: Kit, error: BaseException, hook: str) -> OutOfMemory:
    """Return the error of a call that found the ring full; assert that it is the contract's, with fact and cure."""
    __tracebackhide__ = True
    assert isinstance(error, OutOfMemory), f"{hook} found the ring full and raised {error!r}, but not OutOfMemory"
    assert_says(error, device=kit.bound.name, hook=hook)
    return error


ROW, BETWEEN = 512, 7
"""Bytes of one row of a target in rows, and between two rows."""


class Lines:
    """A slab whose bytes are assigned to consecutive writes, with gaps that must not change."""

    def __init__(self, kit: Kit, nbytes: int) -> None:
        self.kit, self.slab, self.at, self.turn = kit, Slab(kit, nbytes), 64, 0
        self.tickets: list[Ticket] = []

    def target(self, nbytes: int, *, rows: bool = False) -> View:
        """Return the next target of so many bytes, contiguous or in rows with gaps between them."""
        begin, self.at = self.at, self.at + nbytes + rows * nbytes // ROW * BETWEEN + 33
        assert self.at <= self.slab.memory.nbytes, "the kit's slab is too small for this test"
        shape, strides = ((nbytes // ROW, ROW), (ROW + BETWEEN, 1)) if rows else ((nbytes,), (1,))
        return View(self.slab.memory, begin, shape, strides, dtype_of("uint8"))

    def write(self, nbytes: int, stream: Stream, *, rows: bool = False) -> Ticket:
        """Write new bytes to a new target, and expect them once the call has returned; pass its error on."""
        self.turn += 1
        target = self.target(nbytes, rows=rows)
        value = noise(self.turn, target.size).reshape(target.shape)
        kept = value.copy()
        ticket = self.kit.bound.async_set_value(target=target, value=value, stream=stream)
        value[...] = 0xEE
        self.slab.over(target)[...] = kept
        self.tickets.append(ticket)
        return ticket

    def must_write(self, nbytes: int, stream: Stream, *, rows: bool = False) -> Ticket:
        """Do the same if there is room, or will be soon: a refusal is a failed assertion."""
        __tracebackhide__ = True
        try:
            return self.write(nbytes, stream, rows=rows)
        except Exception as error:
            raise AssertionError(f"{nbytes} bytes, for which there is room: raised {error!r}") from error

    def empty_ring(self, stream: Stream) -> None:
        """Leave the whole ring free in one piece: its last span has all its bytes, and has passed.

        The writes that filled the slab may have left spans anywhere, and the free room beside them depends on their
        timing.
        """
        __tracebackhide__ = True
        arrive(self.must_write(RING, stream))

    def until_refused(self, sizes: Sequence[int], stream: Stream, *, rows: bool = False) -> OutOfMemory | None:
        """Write until the ring is full, at most :data:`ENOUGH` times; return the refusal, which must be the
        contract's."""
        for turn in range(ENOUGH):
            try:
                self.write(sizes[turn % len(sizes)], stream, rows=rows)
            except Exception as error:  # noqa: BLE001 (whatever it is, it must be the contract's)
                return refusal(self.kit, error, "async_set_value")
        return None

    def check(self, after: str) -> None:
        """Wait for every write, and compare every byte."""
        __tracebackhide__ = True
        for ticket in self.tickets:
            arrive(ticket)
        self.tickets.clear()
        self.slab.check(after)
