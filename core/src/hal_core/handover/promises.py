"""The receiving side of a transfer: promised blocks, the contents received, and how each promise ends (G29, G30)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hal_core.errors import HalError, InvalidValue
from hal_core.handover.messages import Blocks, End, Seal, crc_of
from hal_core.handover.protocol import (
    Arrived,
    BlockCache,
    Cancelled,
    Description,
    Handover,
    HandoverEvent,
    HandoverKey,
    PeerLost,
    Rejected,
)
from hal_core.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = 4096
"""Most ended keys that are remembered, for messages that come later, and most requests whose newest attempt is."""


_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass
class Promise:
    """Blocks that a source may fill. ``crcs``: number of a block to the checksum of its received contents."""

    key: HandoverKey
    blocks: tuple[int, ...]
    source: Description
    since: float
    crcs: dict[int, int] = field(default_factory=dict)
    writes: list[Ticket] = field(default_factory=list)
    end: HandoverEvent | None = None


class Promises:
    """All promises of one cache."""

    def __init__(self, cache: BlockCache, digest: bytes) -> None:
        """``digest``: of this side's fingerprint."""
        self._cache, self._digest = cache, digest
        self.open: dict[HandoverKey, Promise] = {}
        self._ending: list[Promise] = []
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._outcomes: OrderedDict[HandoverKey, End] = OrderedDict()

    def add(self, key: HandoverKey, blocks: Sequence[int], source: Description, now: float) -> None:
        """Reserve blocks as ``KvTransfer.reserve`` does; fingerprints were already compared."""
        wanted = tuple(map(int, blocks))
        if (known := self.open.get(key)) is not None:
            if (known.blocks, known.source.session) != (wanted, source.session):
                raise InvalidValue(f"{key} has other blocks reserved", cure="raise the attempt", argument="key")
            return
        if key.attempt <= self._attempts.get(key.request_id, -1):
            what = (
                f"attempt {key.attempt} of {key.request_id!r} is late: attempt {self._attempts[key.request_id]} is "
                "already known"
            )
            raise InvalidValue(what, cure="raise the attempt for each try", argument="key")
        if not wanted or len({*wanted}) != len(wanted) or not all(0 <= b < self._cache.blocks for b in wanted):
            cure = f"give each block once, from 0 to {self._cache.blocks - 1}"
            raise InvalidValue(f"{list(wanted)} cannot be reserved", cure=cure, argument="blocks")
        for other in (*self.open.values(), *self._ending):
            if taken := sorted({*wanted} & {*other.blocks}):
                what = f"block {taken[0]} is reserved for {other.key}, which has not ended"
                raise InvalidValue(what, cure="wait until receive() returns its end", argument="blocks")
        for former in [known for known in self.open if known.request_id == key.request_id]:
            self.end(former, Cancelled(former))
        self.open[key] = Promise(key, wanted, source, now)
        _remember(self._attempts, key.request_id, key.attempt)

    def take(self, key: HandoverKey, message: Blocks, data: memoryview) -> None:
        """Write received contents into the promised blocks; anything wrong ends the promise."""
        promise = self.open[key]
        if wrong := self._wrong(promise, message, data):
            self.end(key, Rejected(key, wrong))
            return
        rows = np.frombuffer(data, np.uint8).reshape(len(message.crcs), self._cache.block_bytes)
        crcs = [crc_of(row.data) for row in rows]
        for row, (crc, stated) in enumerate(zip(crcs, message.crcs, strict=True)):
            number = message.first + row
            if crc != stated:
                self.end(key, Rejected(key, f"block {number}: the checksum is {crc:#x}, the sender's is {stated:#x}"))
                return
            if promise.crcs.get(number, crc) != crc:
                self.end(key, Rejected(key, f"block {number} came again with other contents"))
                return
        fresh = [row for row in range(len(crcs)) if message.first + row not in promise.crcs]
        if not fresh:
            return
        try:
            blocks = [promise.blocks[message.first + row] for row in fresh]
            promise.writes.append(self._cache.write(blocks, rows if len(fresh) == len(rows) else rows[fresh]))
        except HalError as error:
            self.end(key, Rejected(key, f"the blocks cannot be written: {error}"))
            return
        promise.writes = [write for write in promise.writes if not write.done() or write.failure() is not None]
        promise.crcs |= {message.first + row: crcs[row] for row in fresh}

    def _wrong(self, promise: Promise, message: Blocks, data: memoryview) -> str:
        count = len(message.crcs)
        if message.facts_digest != self._digest:
            return "the sender's blocks differ from those here: its fingerprint is another"
        if message.first < 0 or not count or message.first + count > len(promise.blocks):
            return f"blocks {message.first} to {message.first + count - 1} came, {len(promise.blocks)} are reserved"
        if len(data) != count * self._cache.block_bytes:
            return f"{len(data)} bytes came for {count} blocks of {self._cache.block_bytes}"
        return ""

    def seal(self, key: HandoverKey, message: Seal) -> None:
        """End the promise as arrived if all blocks are there, else as rejected (G29)."""
        promise = self.open[key]
        drafts = tuple(message.drafts)
        handover = Handover(message.blocks, message.tokens, message.first_token, drafts, message.state)
        if wrong := incomplete(promise, handover, message.digest):
            self.end(key, Rejected(key, wrong))
        else:
            self.end(key, Arrived(key, handover))

    def end(self, key: HandoverKey, event: HandoverEvent) -> None:
        """Close the promise: it takes no more blocks, and ends when its running writes have finished."""
        promise = self.open.pop(key)
        promise.end = event
        self._ending.append(promise)

    def cancel(self, key: HandoverKey) -> None:
        """Cancel the promise, even if all blocks have arrived but the end was not yet returned."""
        if key in self.open:
            self.end(key, Cancelled(key))
        for promise in self._ending:
            if promise.key == key and isinstance(promise.end, Arrived):
                promise.end = Cancelled(key)

    def settled(self) -> Iterator[tuple[Promise, HandoverEvent]]:
        """Yield promises that have ended and into whose blocks no write is running (G30)."""
        ending, self._ending = self._ending, []
        for promise in ending:
            if may_be_written(promise):
                self._ending.append(promise)
                continue
            event = promise.end
            assert event is not None
            failed = [error for write in promise.writes if (error := _failure(write)) is not None]
            if failed and isinstance(event, Arrived):
                event = Rejected(promise.key, f"the blocks could not be written: {failed[0]}")
            why = event.why if isinstance(event, Rejected) else ""
            _remember(self._outcomes, promise.key, End(*_named(promise.key), _OUTCOMES[type(event)], why))
            yield promise, event

    def outcome(self, key: HandoverKey) -> End | None:
        """Return how a key ended; None while it is open."""
        if key in self.open or any(promise.key == key for promise in self._ending):
            return None
        return self._outcomes.get(key) or End(*_named(key), "rejected", "no blocks are reserved for it")


_OUTCOMES = {Arrived: "arrived", Rejected: "rejected", Cancelled: "cancelled", PeerLost: "cancelled"}


def may_be_written(promise: Promise) -> bool:
    """Return whether a running write may still change blocks of an ended promise."""
    return not all(write.done() for write in promise.writes)


def incomplete(promise: Promise, handover: Handover, digest: bytes) -> str:
    """Return what is wrong with a seal; "" if everything arrived as it states."""
    missing = [number for number in range(handover.blocks) if number not in promise.crcs]
    if missing:
        return f"the seal states {handover.blocks} blocks, and block {missing[0]} has not come"
    if len(promise.crcs) != handover.blocks or handover.blocks < 1 or handover.tokens < 1:
        return f"the seal states {handover.blocks} blocks of {handover.tokens} tokens, {len(promise.crcs)} have come"
    return "" if digest == digest_of(promise.crcs, handover) else "the digest of the seal is wrong"


def digest_of(crcs: Mapping[int, int], handover: Handover) -> bytes:
    """Return a 16-byte digest of all blocks' numbers and checksums and the seal's fields."""
    digest = blake2b(digest_size=16)
    digest.update(np.array(sorted(crcs.items()), "<i8").tobytes())
    numbers = (handover.blocks, handover.tokens, handover.first_token, *handover.drafts)
    digest.update(np.array(numbers, "<i8").tobytes())
    digest.update(handover.state)
    return digest.digest()


def _failure(write: Ticket) -> BaseException | None:
    error = write.failure()
    write.observed = write.observed or error is not None  # reported as the end of the promise
    return error


def _named(key: HandoverKey) -> tuple[str, int]:
    return key.request_id, key.attempt


def _remember(book: OrderedDict[_K, _V], name: _K, value: _V) -> None:
    book[name] = value
    book.move_to_end(name)
    while len(book) > KEPT:
        book.popitem(last=False)
