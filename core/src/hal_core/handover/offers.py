"""The sending side of a transfer: pending blocks for each peer, and the progress of sending them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hal_core.errors import InvalidValue
from hal_core.handover.messages import Alive, Beat, Blocks, Message, Seal, Withdraw, crc_of, pack
from hal_core.handover.promises import digest_of
from hal_core.handover.protocol import BlockCache, Description, Handover, HandoverKey
from hal_core.handover.wire import Wire

WINDOW_BYTES = 64 << 20
"""Limit on bytes that were sent to one peer and that it has not yet acknowledged."""
MESSAGE_BYTES = 8 << 20
"""A message carries blocks of up to this many bytes, or one block."""


@dataclass
class Offer:
    """Blocks to send for one key: pieces in order, then the seal."""

    pieces: list[tuple[int, list[int]]] = field(default_factory=list)
    crcs: dict[int, int] = field(default_factory=dict)
    handover: Handover | None = None
    since: float = 0.0
    """When its last part was given here."""
    next_piece: int = 0
    is_sealed: bool = False
    """Whether the seal was given to the wire."""


class Peer:
    """One receiver and the blocks offered to it."""

    def __init__(self, to: Description, wire: Wire, cache: BlockCache, digest: bytes, now: float) -> None:
        self.to, self._wire, self._cache, self._digest = to, wire, cache, digest
        self.offers: dict[HandoverKey, Offer] = {}
        self.withdrawn: dict[HandoverKey, bool] = {}
        """Keys cancelled here, and whether the peer was notified; kept until it has answered."""
        self.heard = self.used = now
        self.next_beat = now
        self.epoch = 0
        self._number = self._sent = self._taken = 0

    @property
    def is_busy(self) -> bool:
        """Whether an answer of the peer is pending."""
        return bool(self.offers or self.withdrawn)

    def begin(self, epoch: int) -> None:
        """Send everything from the beginning, as messages on the way may be lost."""
        self.epoch = epoch
        self._number = self._sent = self._taken = 0
        for offer in self.offers.values():
            offer.next_piece, offer.is_sealed = 0, False
        self.withdrawn = dict.fromkeys(self.withdrawn, False)

    def add(self, key: HandoverKey, first: int, blocks: list[int], now: float) -> None:
        """Add blocks of a key, in pieces of one message each."""
        offer = self.offers.setdefault(key, Offer())
        if offer.handover is not None:
            raise InvalidValue(f"{key} is already sealed", cure="send all blocks before the seal", argument="key")
        most = max(1, MESSAGE_BYTES // self._cache.block_bytes)
        offer.pieces += [(first + at, blocks[at : at + most]) for at in range(0, len(blocks), most)]
        offer.since = self.used = now

    def seal(self, key: HandoverKey, handover: Handover, now: float) -> None:
        """Mark a key as complete: all its blocks were given."""
        offer = self.offers.get(key)
        if offer is None:
            raise InvalidValue(f"no blocks were sent for {key}", cure="send its blocks first", argument="key")
        if offer.handover not in (None, handover):
            raise InvalidValue(f"{key} is sealed as {offer.handover}", cure="raise the attempt", argument="handover")
        offer.handover, offer.since = handover, now

    def withdraw(self, key: HandoverKey) -> None:
        """Cancel a key."""
        del self.offers[key]
        self.withdrawn[key] = False

    def hear(self, alive: Alive, renew: Callable[[], int]) -> None:
        """Take the peer's progress. If it missed a message, send everything again in the epoch ``renew()``."""
        if alive.epoch == self.epoch:
            self._taken = max(self._taken, alive.nbytes)
            if alive.again:
                self.begin(renew())

    def pump(self, now: float, beat: float) -> None:
        """Send pending messages as far as window and wire have room, and a heartbeat every ``beat`` seconds."""
        for message, data, done in self._due():
            if not self._say(message, data):
                return
            done()
        if self.is_busy and now >= self.next_beat:
            waiting = [key for key, offer in self.offers.items() if offer.is_sealed] + list(self.withdrawn)
            told = [(key.request_id, key.attempt) for key in waiting]
            if self._say(Beat(self.to.session, self.epoch, told), b""):
                self.next_beat = now + beat

    def _due(self) -> Iterator[tuple[Message, bytes | memoryview, Callable[[], None]]]:
        """Yield pending messages, each with the function to call once the wire has taken it."""
        head = (self.to.session, self.epoch)
        for key, offer in self.offers.items():
            while offer.next_piece < len(offer.pieces):
                if self._sent - self._taken >= WINDOW_BYTES:
                    return
                first, blocks = offer.pieces[offer.next_piece]
                rows = self._cache.read(blocks)
                crcs = [crc_of(row.data) for row in rows]
                offer.crcs |= {first + row: crc for row, crc in enumerate(crcs)}
                told = Blocks(*head, key.request_id, key.attempt, first, self._digest, crcs)
                yield told, rows.reshape(-1).data, lambda offer=offer: _next(offer)  # type: ignore[misc]
            if (said := offer.handover) is not None and not offer.is_sealed:
                digest = digest_of(offer.crcs, said)
                told_seal = Seal(
                    *head,
                    key.request_id,
                    key.attempt,
                    said.blocks,
                    said.tokens,
                    said.first_token,
                    list(said.drafts),
                    said.state,
                    digest,
                )
                yield told_seal, b"", lambda offer=offer: setattr(offer, "is_sealed", True)  # type: ignore[misc]
        for key, told_already in list(self.withdrawn.items()):
            if not told_already:
                note = lambda key=key: self.withdrawn.__setitem__(key, True)  # noqa: E731
                yield Withdraw(*head, key.request_id, key.attempt), b"", note

    def _say(self, message: Message, data: bytes | memoryview) -> bool:
        frame = pack(message, data, session=self._wire.session, number=self._number + 1)
        if not self._wire.send(self.to.session, frame):
            return False
        self._number += 1
        self._sent += len(frame)
        return True


def _next(offer: Offer) -> None:
    offer.next_piece += 1
