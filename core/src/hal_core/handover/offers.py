"""The sending side of a transfer: pending blocks for each peer, and the progress of sending them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hal_core.errors import InvalidValue
from hal_core.handover.messages import Blocks, End, Message, Seal, crc_of, pack
from hal_core.handover.promises import digest_of
from hal_core.handover.protocol import BlockCache, Description, Handover, HandoverKey
from hal_core.handover.wire import Wire

MESSAGE_BYTES = 8 << 20
"""A message carries blocks of up to this many bytes, or one block."""


@dataclass
class Offer:
    """Blocks to send for one key: pieces in order, then the seal."""

    pieces: deque[tuple[int, list[int]]] = field(default_factory=deque)
    crcs: dict[int, int] = field(default_factory=dict)
    handover: Handover | None = None
    since: float = 0.0
    """When its last part was given here."""
    seal_sent: bool = False
    """Whether the seal was given to the wire."""


class Peer:
    """One receiver and the blocks offered to it."""

    def __init__(self, to: Description, wire: Wire, cache: BlockCache, digest: bytes) -> None:
        self.to, self._wire, self._cache, self._digest = to, wire, cache, digest
        self.offers: dict[HandoverKey, Offer] = {}
        self._withdrawn: deque[HandoverKey] = deque()

    def add(self, key: HandoverKey, first: int, blocks: list[int], now: float) -> None:
        """Add blocks of a key, in pieces of one message each."""
        offer = self.offers.setdefault(key, Offer())
        if offer.handover is not None:
            raise InvalidValue(f"{key} is already sealed", cure="send all blocks before the seal", argument="key")
        most = max(1, MESSAGE_BYTES // self._cache.block_bytes)
        offer.pieces += [(first + at, blocks[at : at + most]) for at in range(0, len(blocks), most)]
        offer.since = now

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
        self._withdrawn.append(key)

    def pump(self) -> None:
        """Send pending messages as far as the wire has room."""
        for key, offer in self.offers.items():
            for message, data in self._due(key, offer):
                if not self._wire.send(self.to.session, *pack(message, data)):
                    return
                if isinstance(message, Blocks):
                    offer.pieces.popleft()
                else:
                    offer.seal_sent = True
        while self._withdrawn:
            key = self._withdrawn[0]
            if not self._wire.send(self.to.session, *pack(End(key.request_id, key.attempt, "cancelled", ""))):
                return
            self._withdrawn.popleft()

    def _due(self, key: HandoverKey, offer: Offer) -> Iterator[tuple[Message, bytes | memoryview]]:
        """Yield the pending messages of a key; the next one when the wire has taken the former."""
        while offer.pieces:
            first, blocks = offer.pieces[0]
            rows = self._cache.read(blocks)
            crcs = [crc_of(row.data) for row in rows]
            offer.crcs |= {first + row: crc for row, crc in enumerate(crcs)}
            yield Blocks(key.request_id, key.attempt, first, self._digest, crcs), rows.reshape(-1).data
        if (last := offer.handover) is not None and not offer.seal_sent:
            digest, drafts = digest_of(offer.crcs, last), list(last.drafts)
            numbers = last.blocks, last.tokens, last.first_token
            yield Seal(key.request_id, key.attempt, *numbers, drafts, last.state, digest), b""
