"""The default :class:`KvTransfer`: blocks as messages over a wire, with checksums, numbers and a window."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hal_core.errors import FrameError, InvalidValue
from hal_core.handover.facts import check_facts, facts_digest
from hal_core.handover.messages import Alive, Answer, Beat, Blocks, Gone, Message, Seal, Withdraw, key_of, pack, unpack
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

MOST_SOURCES = 1024
"""The progress of this many senders is remembered."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts in seconds; by default those of :mod:`hal_core.timeouts`.

    ``silence``: a peer that owes an answer and sends nothing for so long is lost. ``deadline``: reserved blocks must be
    sealed, and sealed keys answered, within it. ``beat``: the interval between heartbeats of a waiting sender.
    ``idle``: an unused connection is closed after it.
    """

    silence: float = field(default_factory=lambda: TIMEOUTS.peer_silence)
    deadline: float = field(default_factory=lambda: TIMEOUTS.peer_deadline)
    beat: float = field(default_factory=lambda: TIMEOUTS.peer_heartbeat)
    idle: float = field(default_factory=lambda: TIMEOUTS.peer_idle)


@dataclass(slots=True)
class _Source:
    """A sender: its progress in its epoch, and when its last message came."""

    heard: float
    epoch: int = 0
    number: int = 0
    nbytes: int = 0


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
        self._sources: OrderedDict[int, _Source] = OrderedDict()
        self._events: list[HandoverEvent] = []
        self._sent: OrderedDict[HandoverKey, None] = OrderedDict()  # keys that have ended on the sending side here
        self._epoch = 0
        self._looked = clock()
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
        peer, now = self._peer(key, to), self._clock()
        peer.add(key, first, numbers, now)
        peer.pump(now, self._patience.beat)

    def seal(self, key: HandoverKey, to: Description, handover: Handover) -> None:
        """See :class:`hal_core.handover.KvTransfer`."""
        peer, now = self._peer(key, to), self._clock()
        peer.seal(key, handover, now)
        peer.pump(now, self._patience.beat)

    def cancel(self, key: HandoverKey) -> None:
        """See :class:`hal_core.handover.KvTransfer`."""
        self._promises.cancel(key)
        for peer in self._peers.values():
            if key in peer.offers:
                peer.withdraw(key)
                self._end_offer(Cancelled(key), key)
                peer.pump(self._clock(), self._patience.beat)

    def receive(self) -> Sequence[HandoverEvent]:
        """See :class:`hal_core.handover.KvTransfer`."""
        now = self._clock()
        self._forgive(now)
        for session in self._wire.renewed():
            if session in self._peers:
                self._peers[session].begin(self._next_epoch())
        for buffer in self._wire.receive():
            try:
                session, number, message, data = unpack(buffer)
            except FrameError:  # A bad message of a peer leaves a gap in its numbers, so it is sent again.
                continue
            if isinstance(message, Alive | Answer | Gone):
                self._hear(session, message, now)
            else:
                self._take(session, number, message, data, len(buffer), now)
        for peer in list(self._peers.values()):
            peer.pump(now, self._patience.beat)
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

    def _source(self, session: int, now: float) -> _Source:
        found = self._sources.setdefault(session, _Source(now))
        self._sources.move_to_end(session)
        if len(self._sources) > MOST_SOURCES:
            self._sources.popitem(last=False)
        return found

    def _take(self, session: int, number: int, message: Message, data: memoryview, size: int, now: float) -> None:
        """Process a sender's numbered message if it is the next in order, else drop it."""
        assert isinstance(message, Blocks | Seal | Withdraw | Beat)
        if message.to != self._wire.session:
            self._reply(session, Gone(session, message.to))
            return
        source = self._source(session, now)
        source.heard = now
        if message.epoch > source.epoch:
            source.epoch, source.number, source.nbytes = message.epoch, 0, 0
        if message.epoch < source.epoch:
            return
        missed = number > source.number + 1
        if number == source.number + 1:
            source.number, source.nbytes = number, source.nbytes + size
            self._obey(session, message, data)
        self._reply(session, Alive(session, source.epoch, source.number, source.nbytes, missed))

    def _obey(self, session: int, message: Blocks | Seal | Withdraw | Beat, data: memoryview) -> None:
        if isinstance(message, Beat):
            for request_id, attempt in message.waiting:
                self._answer(session, HandoverKey(request_id, attempt))
            return
        key = key_of(message)
        promise = self._promises.open.get(key)
        if promise is None:
            self._answer(session, key)
        elif promise.source.session != session:
            why = "its blocks are reserved for another sender"
            self._reply(session, Answer(session, key.request_id, key.attempt, "rejected", why))
        elif isinstance(message, Blocks):
            self._promises.take(key, message, data)
        elif isinstance(message, Seal):
            self._promises.seal(key, message)
        else:
            self._promises.end(key, Cancelled(key))

    def _answer(self, session: int, key: HandoverKey) -> None:
        """Send again how a key ended."""
        if (told := self._promises.outcome(key)) is not None:
            self._reply(session, told)

    def _reply(self, session: int, message: Alive | Answer | Gone) -> None:
        """Reply if the wire takes it; the sender asks again otherwise."""
        message.to = session
        self._wire.reply(session, pack(message, session=self._wire.session))

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
        if key in self._sent:
            raise InvalidValue(f"{key} has ended here", cure="raise the attempt for each try", argument="key")
        if any(key in peer.offers for session, peer in self._peers.items() if session != to.session):
            raise InvalidValue(
                f"{key} is being sent to another peer", cure="raise the attempt for each try", argument="to"
            )
        if (found := self._peers.get(to.session)) is None:
            self._wire.connect(to)
            found = self._peers[to.session] = Peer(to, self._wire, self._cache, self._digest, self._clock())
            found.begin(self._next_epoch())
        if not found.is_busy:  # No answer was pending until now.
            found.heard = self._clock()
        return found

    def _next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def _hear(self, session: int, message: Alive | Answer | Gone, now: float) -> None:
        if message.to != self._wire.session:
            return
        if isinstance(message, Gone) and message.meant in self._peers:  # A newer listener at this address sends it.
            self._drop(message.meant)
        peer = self._peers.get(session)
        if peer is None or isinstance(message, Gone):
            return
        peer.heard = now
        if isinstance(message, Alive):
            peer.hear(message, self._next_epoch)
            return
        key = key_of(message)
        peer.withdrawn.pop(key, None)
        if (offer := peer.offers.get(key)) is not None:
            del peer.offers[key]
            self._end_offer(_event(key, message, offer), key)

    def _end_offer(self, event: HandoverEvent, *keys: HandoverKey) -> None:
        self._events.append(event)
        for key in keys:
            self._sent[key] = None
        while len(self._sent) > KEPT:
            self._sent.popitem(last=False)

    # Time --------------------------------------------------------------------------------------------------------

    def _forgive(self, now: float) -> None:
        """Extend deadlines by the time in which this side did not call receive(): the peers were not silent then."""
        away, self._looked = now - self._looked, now
        if away > self._patience.silence / 2:
            for source in self._sources.values():
                source.heard += away
            for peer in self._peers.values():
                peer.heard += away
            for promise in self._promises.open.values():
                promise.since += away

    def _end_late(self, now: float) -> None:
        """End keys whose peer is gone or whose deadline has passed (G32)."""
        for key, promise in list(self._promises.open.items()):
            known = self._sources.get(promise.source.session)
            heard = promise.since if known is None else max(promise.since, known.heard)
            if is_over(heard, now, self._patience.silence):
                self._promises.end(key, PeerLost(promise.source.url, (key,)))
            elif is_over(promise.since, now, self._patience.deadline):
                self._promises.end(key, Rejected(key, f"not sealed within {self._patience.deadline:g} s"))
        for session, peer in list(self._peers.items()):
            for key, offer in list(peer.offers.items()):
                if offer.is_sealed and is_over(offer.since, now, self._patience.deadline):
                    peer.withdraw(key)
                    self._end_offer(Rejected(key, f"not answered within {self._patience.deadline:g} s"), key)
            since, most = (peer.heard, self._patience.silence) if peer.is_busy else (peer.used, self._patience.idle)
            if is_over(since, now, most):
                self._drop(session)

    def _drop(self, session: int) -> None:
        peer = self._peers.pop(session)
        self._wire.disconnect(session)
        if peer.offers:
            self._end_offer(PeerLost(peer.to.url, tuple(peer.offers)), *peer.offers)


def is_over(since: float, now: float, seconds: float) -> bool:
    """Return whether more than ``seconds`` have passed."""
    return now - since > seconds


def _event(key: HandoverKey, answer: Answer, offer: Offer) -> HandoverEvent:
    """Translate the receiver's answer into the offer's event."""
    if answer.outcome == "arrived" and offer.handover is not None:
        return Arrived(key, replace(offer.handover))
    return Cancelled(key) if answer.outcome == "cancelled" else Rejected(key, answer.why)
