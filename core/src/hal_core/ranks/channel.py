"""Parts of a broadcast besides moving bytes: the shared configuration, the header, the checked ticket.

This module is independent of device and framework. A :class:`BroadcastChannel` belongs to one state and one group. When
it is opened, the ranks compare their configurations. Each broadcast begins with a header that identifies it (G14).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import metadata
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from ..errors import GroupLost, HalError, StateUnusable
from ..memory.plan import PlanBuilder, WritePlan
from ..memory.views import ByteRange
from ..slots.fields import HEADER_BYTES
from ..tickets import DONE, Mode, PromiseTicket, Ticket
from .shared_config import SharedConfig, differences

if TYPE_CHECKING:
    from ..group import Group
    from ..memory.copies import CopyTicket
    from ..slots.state import SlotState, StateDevice
    from ..streams import Stream
    from .communicator import Communicator

HEADER = struct.Struct("<4sHHQQQ32s")
"""Magic, version, header bytes, slice bytes, number of the broadcast, updates of the state, digest of the shared
configuration."""
MAGIC, VERSION = b"HALB", 1
COUNTS, COUNTS_AT = struct.Struct("<QQ"), 16
"""The part of the header that changes with each call: number and updates."""
assert HEADER.size == HEADER_BYTES


@cache
def core_version() -> str:
    """Return the version of the core that this process runs: the installed distribution's, else "source"."""
    try:
        return metadata.version("paddle-hal-core")
    except metadata.PackageNotFoundError:
        return "source"


def shared_config_of(state: SlotState, group: Group) -> SharedConfig:
    """Return the configuration of ``state`` that every rank of ``group`` must share."""
    layout, part = state.layout, state.broadcast_range()
    table = "".join(
        f"{p.field.name}:{p.field.dtype.name}:{p.width}:{sorted(p.field.groups)}:{p.field.reset};"
        for p in layout.fields.values()
    )
    listed = [name for name, p in layout.fields.items() if part.offset <= p.offset < part.end]
    return SharedConfig.of(
        {
            "contract": f"paddle-hal-core {core_version()}, broadcast header {VERSION}",
            "group": ",".join(map(str, group.ranks)),
            "source": f"rank {group.source}",
            "state": state.name,
            "sizes": " ".join(f"{f.name}={getattr(state.sizes, f.name)}" for f in fields(state.sizes)),
            "broadcast list": " ".join(listed),
            "broadcast slice": f"{part.nbytes} bytes from {part.offset}",
            "slot table": f"{len(layout.fields)} fields, {hashlib.sha256(table.encode()).hexdigest()}",
            "layout": layout.digest.hex(),
        }
    )


class BroadcastChannel:
    """The agreement of one group's ranks about one state, and the next broadcast's number.

    ``number`` counts the broadcasts of this state on this group, from 1. ``expected`` is the header of the last one,
    ``last`` its ticket.
    """

    __slots__ = (
        "_announce", "_first", "_header", "_host", "_put", "_start", "_writes", "device", "expected", "group", "last",
        "number", "state"
    )  # fmt: skip

    def __init__(self, device: StateDevice, state: SlotState, group: Group, communicator: Communicator) -> None:
        """Exchange and compare the shared configurations. Every rank of the group calls this, and raises if one
        differs."""
        shared = shared_config_of(state, group)
        found = differences(communicator.exchange(shared.block()))
        if found:
            error = StateUnusable(
                f"the ranks of group {group.ranks} disagree about state {state.name!r}: " + "; ".join(found),
                cure="start every rank with the same sizes, slot table, group and version of paddle-hal-core",
                hook="broadcast_tokens",
                argument="state",
            )
            state.mark_unusable(error.what)
            raise error
        self.device, self.state, self.group = device, state, group
        self.number, self.expected = 0, b""
        self.last: Ticket = DONE
        self._first = group.is_first
        begin, nbytes = state.broadcast_range().offset, state.broadcast_range().nbytes
        self._start = bytearray(HEADER.pack(MAGIC, VERSION, HEADER_BYTES, nbytes, 0, 0, shared.digest()))
        self._header = ByteRange(begin, HEADER_BYTES)
        builder = PlanBuilder(state.memory)
        builder.copy(np.array([begin], np.int64), HEADER_BYTES, np.zeros(HEADER_BYTES, np.uint8))
        self._writes = builder.build().writes
        self._put: Callable[..., Ticket] | None = getattr(device, "put_bytes", None)  # a few bytes without a plan
        # If the host may touch the device's memory at any time, the header needs neither a plan nor a copy. They cost
        # 10 us a call each, as does everything that runs with cold caches right after a wait.
        touchable: memoryview | None = getattr(state.memory, "host_bytes", None)
        self._host = None if touchable is None else touchable[begin : begin + HEADER_BYTES]
        self._announce: Callable[..., None] | None = getattr(communicator, "announce", None)

    def begin(self, stream: Stream) -> None:
        """Count the broadcast. On the source, write its header in stream order, or have the communicator write it."""
        self.number += 1
        COUNTS.pack_into(self._start, COUNTS_AT, self.number, self.state.updates)
        self.expected = bytes(self._start)
        if self._announce is not None:
            self._announce(self.state.memory, self._header, self.expected if self._first else b"")
            return
        if not self._first:
            return
        if self._host is not None:
            self._host[:] = self.expected
        elif self._put is not None:
            self._put(self.state.memory, self._header.offset, self.expected, stream)
        else:
            self.device.submit(WritePlan(self.state.memory, self._writes, (self.expected,)), stream)

    def lost(self, error: GroupLost) -> Ticket:
        """Return the ticket of a broadcast whose group was lost."""
        ticket = PromiseTicket("sync")
        error.located(device=f"{self.device.name}:{self.device.index}", hook="broadcast_tokens")
        ticket.complete(error)
        self.last = ticket
        return ticket

    def checked(self, ticket: Ticket, stream: Stream) -> Ticket:
        """Return the ticket of a broadcast on ``stream``: done when the bytes have arrived and the header is right."""
        if ticket is DONE and self._host is not None and self._host.tobytes() == self.expected:
            self.last = DONE
            return DONE
        copy = getattr(ticket, "header", None) or self.device.copy_out(self.state.memory, (self._header,), stream)
        self.last = CheckedTicket(self, ticket, copy, self.expected)
        return self.last

    def disagreement(self, header: bytes, expected: bytes) -> StateUnusable:
        """Mark the state unusable and return the error that compares the slice's header with the expected one."""
        error = StateUnusable(
            f"the slice from rank {self.group.source} begins with {describe(header)}, but this rank, "
            f"{self.group.rank}, is at {describe(expected)}",
            cure="a rank missed a step or sent other fields; create a new state on every rank of the group",
            device=f"{self.device.name}:{self.device.index}",
            hook="broadcast_tokens",
            argument="state",
        )
        self.state.mark_unusable(error.what)
        return error


def channel_of(state: SlotState, group: Group) -> BroadcastChannel | None:
    """Return the channel of a state and group; None before it is opened."""
    found: BroadcastChannel | None = state.channels.get(group.ranks)
    return found


def describe(header: bytes) -> str:
    """Return the text of a header, for errors."""
    magic, version, size, nbytes, number, updates, digest = HEADER.unpack(header)
    if (magic, version, size) != (MAGIC, VERSION, HEADER_BYTES):
        return "no header" if any(header) else "a header of zeros"
    return f"broadcast {number} after {updates} steps ({nbytes} bytes, digest {digest[:4].hex()})"


class CheckedTicket(Ticket):
    """A ticket that is done when the collective is and its header was compared; a wrong header makes the state unusable
    (G14)."""

    __slots__ = ("_channel", "_copy", "_error", "_expected", "_inner", "_known", "_over", "mode")
    _error: BaseException | None

    def __init__(self, channel: BroadcastChannel, inner: Ticket, copy: CopyTicket, expected: bytes) -> None:
        super().__init__()
        self.mode: Mode = "sync" if inner.mode == copy.mode == "sync" else "async"
        self._channel, self._inner, self._copy, self._expected = channel, inner, copy, expected
        self._known, self._over, self._error = False, False, None
        # Only sync: checking work that was just put on a stream is too early, and costs time.
        if self.mode == "sync" and self.done():
            self.failure()  # marks the state now, before any wait

    def done(self) -> bool:
        if not self._over:  # Each check costs time, and the next hook checks this ticket and its error anyway.
            self._over = self._inner.done() and (self._inner.failure() is not None or self._copy.done())
        return self._over

    def _block(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else monotonic() + timeout
        if self._over or not self._inner._block(timeout):
            return self._over
        left = None if deadline is None else max(0.0, deadline - monotonic())
        return self._inner.failure() is not None or self._copy._block(left)

    def failure(self) -> BaseException | None:
        if self._known or not self.done():
            return self._error
        error = self._inner.failure() or self._copy.failure()
        if error is None:
            header = self._copy.first_bytes()
            error = None if header == self._expected else self._channel.disagreement(header, self._expected)
        elif isinstance(error, HalError):
            device = self._channel.device
            error.located(device=f"{device.name}:{device.index}", hook="broadcast_tokens")
        self._error, self._known = error, True
        return error


class OutputCheck:
    """A check for a step's output: the expected start of the copied bytes and the broadcast they come from (G14)."""

    __slots__ = ("_channel", "_expected", "_last", "_offset")

    def __init__(self, channel: BroadcastChannel, part: ByteRange) -> None:
        self._channel, self._expected, self._last = channel, channel.expected, channel.last
        self._offset = channel.state.broadcast_range().offset - part.offset

    @classmethod
    def of(cls, state: SlotState, group: Group, part: ByteRange) -> OutputCheck | None:
        """Return the check for a state and a group; None if no broadcast took place (a group of one, no step yet)."""
        channel = channel_of(state, group)
        return cls(channel, part) if channel is not None and channel.number else None

    def verify(self, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Raise the broadcast's error, or :class:`StateUnusable` if the header is of another broadcast."""
        self._last.wait()
        header = data[self._offset : self._offset + HEADER_BYTES].tobytes()
        if header != self._expected:
            raise self._channel.disagreement(header.ljust(HEADER_BYTES, b"\0"), self._expected)
