"""What two workers say to each other of a request whose keys and values move: the terms, and :class:`KvTransfer`.

The decode worker promises blocks (``reserve``), the prefill worker fills them (``send``) and says that it was all
(``seal``); what became of it both learn of ``receive``. Who gives a request to whom is the engine's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from hal_core.tickets import Ticket


@dataclass(frozen=True, slots=True, order=True)
class HandoverKey:
    """One try to hand a request over. The request keeps its name; each further try has a higher ``attempt``."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Description:
    """Where a transfer listens, and what its blocks are.

    :param url: as :mod:`hal.transport` writes addresses; a vendor's own transfer writes its own.
    :param public_key: the key that it is known by (CURVE, Z85), "" where its wire needs none.
    :param facts: label to text of what both sides must hold equal (:data:`hal_core.handover.FACTS`).
    :param session: random for each life of a transfer, so that what was meant for a former one is not taken.
    """

    url: str
    public_key: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    session: int = 0


@dataclass(frozen=True, slots=True)
class Handover:
    """What a seal says.

    :param blocks: how many blocks were sent, numbered from 0.
    :param tokens: whose keys and values lie in them: the prompt's, and of the output all but the last.
    :param first_token: the token that the prefill worker sampled, -1 if it goes another way.
    :param drafts: the drafts behind it.
    :param state: what a proposer needs to go on there; the transfer does not look into it.
    """

    blocks: int
    tokens: int
    first_token: int = -1
    drafts: tuple[int, ...] = ()
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every block is in place and the seal was found right.

    On the receiving side the blocks may be used; on the sending side nothing of the transfer reads them any more.
    """

    key: HandoverKey
    handover: Handover


@dataclass(frozen=True, slots=True)
class Rejected:
    """The receiving side found something wrong and dropped what it had. Told on both sides; nothing was used."""

    key: HandoverKey
    why: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """It was given up here or there, and on this side nothing writes or reads the blocks any more."""

    key: HandoverKey


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The other side is gone. All of ``keys`` have ended with it, and nothing writes or reads their blocks here."""

    url: str
    keys: tuple[HandoverKey, ...]


HandoverEvent: TypeAlias = Arrived | Rejected | Cancelled | PeerLost
"""How a handover ends. Each key that was reserved, or sent for, ends once on that side."""


class BlockCache(Protocol):
    """The blocks of a worker as bytes: of one block id the keys and values of all layers, one after the other."""

    blocks: int
    """How many there are; ids are 0 to ``blocks - 1``."""
    block_bytes: int
    """Bytes of one."""

    def facts(self) -> Mapping[str, str]:
        """What these bytes mean, label to text: see :data:`hal_core.handover.FACTS`."""

    def read(self, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of these blocks, uint8 ``[len(blocks), block_bytes]``, as the work put on the device before the
        call leaves them. It may wait for that work. The caller may keep the array."""

    def write(self, blocks: Sequence[int], data: np.ndarray[Any, np.dtype[np.uint8]]) -> Ticket:
        """Put ``data``, uint8 ``[len(blocks), block_bytes]``, into these blocks, each of which is named once.

        The data may be changed when the call returns; the ticket is done when the blocks hold it.
        """


class KvTransfer(Protocol):
    """Moves blocks between two workers: six methods, and what closes it. One thread uses it, and no call waits for a
    peer.

    - G29 no block is used before its seal: ``Arrived`` is told once every block that was sent lies in its place, with
      the contents that the sender read, and the seal's count and digest were found right; else ``Rejected``.
    - G30 no block is freed while it may be written: the end of a handover is told when nothing that was begun writes
      its blocks any more, and nothing that comes later does, whatever is still on its way. Until then its blocks are
      promised to no other; of a request the newest attempt alone is promised anything.
    - G31 the fingerprints of both sides are compared before the first byte moves, and what differs is refused by name.
    - G32 each key that was reserved, or sent for, ends by one event on that side, in bounded time: also when the peer
      hangs, vanishes, or forgets it, so long as ``receive`` is called four times a second, and as ``sockets`` ask.
    """

    def describe(self) -> Description:
        """Where this side listens and what its blocks are; the engine carries it to the other side."""

    def reserve(self, key: HandoverKey, blocks: Sequence[int], source: Description) -> None:
        """Decode side: promise blocks of the own cache to what ``source`` sends for the key.

        The same call again changes nothing. A promise of an older attempt of the request is cancelled by it.

        :raises InvalidValue: naming the first fact that differs from the source's; for blocks that are none or are
            promised already; for an attempt that is not above those known of the request. Nothing is promised then.
        """

    def send(self, key: HandoverKey, to: Description, first: int, blocks: Sequence[int]) -> None:
        """Prefill side: the contents of own ``blocks`` are for number ``first`` and on of those promised there.

        Never waits: what the wire has no room for is read from the blocks later, so they must stay as they are until
        the key has ended. With no blocks it opens the way, so that the peer's silence is noticed from then on.

        :raises InvalidValue: naming the first fact that differs from the receiver's, before any byte leaves; for blocks
            that are none; after the seal; for a key that has ended here.
        """

    def seal(self, key: HandoverKey, to: Description, handover: Handover) -> None:
        """Prefill side: that was all. Goes behind everything sent for the key. The same call again changes nothing.

        :raises InvalidValue: as ``send`` does.
        """

    def receive(self) -> Sequence[HandoverEvent]:
        """Move what can move now, and return what has ended since the last call. Never waits."""

    def cancel(self, key: HandoverKey) -> None:
        """Give it up, on either side, and tell the other. ``receive`` tells ``Cancelled`` once nothing here writes or
        reads its blocks. For a key that is not known, or has ended, nothing happens."""

    @property
    def sockets(self) -> Sequence[Any]:
        """What a poll may wait for (``zmq.Poller``: sockets or descriptors); when one can be read, call ``receive``."""

    def close(self) -> None:
        """End all without a word more than is on its way. Idempotent."""

    def __enter__(self) -> KvTransfer: ...

    def __exit__(self, *_: object) -> None: ...
