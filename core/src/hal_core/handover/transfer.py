"""The default :class:`KvTransfer`: blocks as messages over a wire, with checksums."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hal_core.errors import FrameError, InvalidValue
from hal_core.handover.facts import check_facts, facts_digest
from hal_core.handover.messages import Blocks, End, Message, key_of, pack, unpack
from hal_core.handover.offers import Offer, Peer
from hal_core.handover.promises import KEPT, Promises
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
from hal_core.handover.wire import Wire
from hal_core.timeouts import TIMEOUTS


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts in seconds; by default those of :mod:`hal_core.timeouts`.

    ``silence``: a peer without a sign of life for so long is lost, and so is one that has not connected by then.
    ``deadline``: reserved blocks must be sealed, and sealed keys answered, within it.
    """

    silence: float = field(default_factory=lambda: TIMEOUTS.silence)
    deadline: float = field(default_factory=lambda: TIMEOUTS.peer_deadline)


class BlockTransfer:
    """See :class:`hal_core.handover.KvTransfer`. It serves both sides: a worker may receive and send."""

    def __init__(
        self,
        cache: BlockCache,
        wire: Wire,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wire`` is closed when the transfer is closed."""
        self._cache, self._wire, self._patience, self._clock = cache, wire, patience or Patience(), clock
        self._facts: Mapping[str, str] = dict(cache.facts())
        self._digest = facts_digest(self._facts)
        self._promises = Promises(cache, self._digest)
        self._peers: dict[int, Peer] = {}
        self._events: list[HandoverEvent] = []
        self._ended_offers: OrderedDict[HandoverKey, None] = OrderedDict()  # keys that have ended on the sending side
        self._last_receive = clock()
        self._closed = False

    def describe(self) -> Description:
        """See :class:`hal_core.handover.KvTransfer`."""
        return Description(self._wire.url, self._wire.public_key, self._facts, self._wire.session)

    def reserve(self, key: HandoverKey, blocks: Sequence[int], source: Description) -> None:
        """See :class:`hal_core.handover.KvTransfer`."""
        check_facts(self._facts, source.facts, source.url, "source")
        self._promises.add(key, blocks, source, self._clock())
        self._wire.admit(source)

    def send(self, key: HandoverKey, to: Description, first: int, blocks: Sequence[int]) -> None:
        """See :class:`hal_core.handover.KvTransfer`. Blocks that find no room wait as numbers, not as bytes.

        :raises InvalidValue: for numbers outside the cache.
        """
        numbers = list(map(int, blocks))
        if first < 0 or not all(0 <= number < self._cache.blocks for number in numbers):
            cure = f"give blocks from 0 to {self._cache.blocks - 1}, and the number of the first of those reserved"
            raise InvalidValue(
                f"{numbers} from number {first} on are not blocks of the cache", cure=cure, argument="blocks"
            )
        peer = self._peer(key, to)
        peer.add(key, first, numbers, self._clock())
        peer.pump()

    def seal(self, key: HandoverKey, to: Description, handover: Handover) -> None:
        """See :class:`hal_core.handover.KvTransfer`."""
        peer = self._peer(key, to)
        peer.seal(key, handover, self._clock())
        peer.pump()

    def cancel(self, key: HandoverKey) -> None:
        """See :class:`hal_core.handover.KvTransfer`."""
        self._promises.cancel(key)
        for peer in self._peers.values():
            if key in peer.offers:
                peer.withdraw(key)
                self._end_offer(Cancelled(key), key)
                peer.pump()

    def receive(self) -> Sequence[HandoverEvent]:
        """See :class:`hal_core.handover.KvTransfer`."""
        now = self._clock()
        self._extend_deadlines(now)
        for session, frame in self._wire.receive():
            try:
                message, data = unpack(frame)
            except FrameError:  # its blocks are missing at the seal
                continue
            if not self._taken_by_sender(session, message):
                self._take_as_receiver(session, message, data)
        for session in self._wire.lost():
            self._end_lost(session)
        for peer in self._peers.values():
            peer.pump()
        self._end_late(now)
        self._settle()
        events, self._events = self._events, []
        return events

    @property
    def sockets(self) -> Sequence[Any]:
        """See :class:`hal_core.handover.KvTransfer`."""
        return self._wire.sockets

    def close(self) -> None:
        """See :class:`hal_core.handover.KvTransfer`."""
        if not self._closed:
            self._closed = True
            self._wire.close()

    def __enter__(self) -> BlockTransfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The receiving side ------------------------------------------------------------------------------------------

    def _take_as_receiver(self, session: int, message: Message, data: memoryview) -> None:
        """Process a sender's message."""
        key = key_of(message)
        promise = self._promises.open.get(key)
        is_own = promise is not None and promise.source.session == session
        if isinstance(message, End):  # which needs no answer
            if is_own:
                self._promises.end(key, Cancelled(key))
        elif promise is None:
            self._answer(session, key)
        elif not is_own:
            why = "its blocks are reserved for another sender"
            self._wire.reply(session, *pack(End(key.request_id, key.attempt, "rejected", why)))
        elif isinstance(message, Blocks):
            self._promises.take(key, message, data)
        else:
            self._promises.seal(key, message)

    def _answer(self, session: int, key: HandoverKey) -> None:
        """Send how a key ended."""
        if (answer := self._promises.outcome(key)) is not None:
            self._wire.reply(session, *pack(answer))

    def _settle(self) -> None:
        lost: dict[str, list[HandoverKey]] = {}
        for promise, event in self._promises.settled():
            if isinstance(event, PeerLost):
                lost.setdefault(event.url, []).append(promise.key)
            else:
                self._events.append(event)
            self._answer(promise.source.session, promise.key)
        self._events += [PeerLost(url, tuple(keys)) for url, keys in lost.items()]

    # The sending side --------------------------------------------------------------------------------------------

    def _peer(self, key: HandoverKey, to: Description) -> Peer:
        """Return the connected peer, after all checks that must precede sending (G31)."""
        check_facts(self._facts, to.facts, to.url, "to")
        if key in self._ended_offers:
            raise InvalidValue(f"{key} has ended here", cure="raise the attempt for each try", argument="key")
        if any(key in peer.offers for session, peer in self._peers.items() if session != to.session):
            raise InvalidValue(
                f"{key} is being sent to another peer", cure="raise the attempt for each try", argument="to"
            )
        if (found := self._peers.get(to.session)) is None:
            self._wire.connect(to)
            found = self._peers[to.session] = Peer(to, self._wire, self._cache, self._digest)
        return found

    def _taken_by_sender(self, session: int, message: Message) -> bool:
        """Process a receiver's answer about a key that is sent to it; return False for any other message."""
        key, peer = key_of(message), self._peers.get(session)
        if not isinstance(message, End) or peer is None or (offer := peer.offers.pop(key, None)) is None:
            return False
        self._end_offer(_event(key, message, offer), key)
        return True

    def _end_offer(self, event: HandoverEvent, *keys: HandoverKey) -> None:
        self._events.append(event)
        for key in keys:
            self._ended_offers[key] = None
        while len(self._ended_offers) > KEPT:
            self._ended_offers.popitem(last=False)

    # Time --------------------------------------------------------------------------------------------------------

    def _extend_deadlines(self, now: float) -> None:
        """Extend the limits of reservations by the time in which this side did not call receive()."""
        away, self._last_receive = now - self._last_receive, now
        if away > self._patience.silence / 2:
            for promise in self._promises.open.values():
                promise.since += away

    def _end_lost(self, session: int) -> None:
        """End the reservations for a peer, and the offers to it, as its connection has ended."""
        for key, promise in list(self._promises.open.items()):
            if promise.source.session == session:
                self._promises.end(key, PeerLost(promise.source.url, (key,)))
        if (peer := self._peers.pop(session, None)) is not None and peer.offers:
            self._end_offer(PeerLost(peer.to.url, tuple(peer.offers)), *peer.offers)

    def _end_late(self, now: float) -> None:
        """End keys whose deadline has passed, and reservations for a source that does not come (G32)."""
        for key, promise in list(self._promises.open.items()):
            if is_over(promise.since, now, self._patience.deadline):
                self._promises.end(key, Rejected(key, f"not sealed within {self._patience.deadline:g} s"))
            elif not self._wire.has_come(promise.source.session) and is_over(
                promise.since, now, self._patience.silence
            ):
                self._promises.end(key, PeerLost(promise.source.url, (key,)))
        for peer in self._peers.values():
            for key, offer in list(peer.offers.items()):
                if offer.handover is not None and is_over(offer.since, now, self._patience.deadline):
                    peer.withdraw(key)
                    self._end_offer(Rejected(key, f"not answered within {self._patience.deadline:g} s"), key)


def is_over(since: float, now: float, seconds: float) -> bool:
    """Return whether more than ``seconds`` have passed."""
    return now - since > seconds


def _event(key: HandoverKey, answer: End, offer: Offer) -> HandoverEvent:
    """Translate the receiver's answer into the offer's event."""
    if answer.outcome == "arrived" and offer.handover is not None:
        return Arrived(key, offer.handover)
    return Cancelled(key) if answer.outcome == "cancelled" else Rejected(key, answer.why)
