"""Terms of a request whose keys and values move between two workers, and the protocol :class:`KvTransfer`.

The decode worker reserves blocks (``reserve``). The prefill worker fills them (``send``) and marks the end (``seal``).
Both learn the result from ``receive``. The engine decides which workers exchange a request.
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
    """One attempt to hand a request over. The request keeps its name; each further attempt has a higher ``attempt``."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Description:
    """The address of a transfer and the fingerprint of its blocks.

    :param url: in the address format of :mod:`hal_engine.transport`; a vendor's own transfer uses its own format.
    :param public_key: its public key (X25519, in Z85), "" where its wire needs none.
    :param facts: the facts that both sides must share, label to text (:data:`hal_core.handover.FACTS`).
    :param session: random for each start of a transfer, so that it rejects messages for an earlier one.
    """

    url: str
    public_key: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    session: int = 0


@dataclass(frozen=True, slots=True)
class Handover:
    """The contents of a seal.

    :param blocks: how many blocks were sent, numbered from 0.
    :param tokens: how many tokens have their keys and values in them: the prompt's, and of the output all but the last.
    :param first_token: the token sampled by the prefill worker, -1 if it travels another way.
    :param drafts: the drafts after it.
    :param state: the proposer's state, which the transfer does not interpret.
    """

    blocks: int
    tokens: int
    first_token: int = -1
    drafts: tuple[int, ...] = ()
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Every block is in place and the seal was verified.

    On the receiving side the blocks may be used. On the sending side the transfer no longer reads them.
    """

    key: HandoverKey
    handover: Handover


@dataclass(frozen=True, slots=True)
class Rejected:
    """The receiving side found an error and dropped the blocks; none was used. Both sides receive this event."""

    key: HandoverKey
    why: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The handover was cancelled on either side. On this side the blocks are neither written nor read any more."""

    key: HandoverKey


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is gone. All of ``keys`` have ended, and their blocks are neither written nor read here any more."""

    url: str
    keys: tuple[HandoverKey, ...]


HandoverEvent: TypeAlias = Arrived | Rejected | Cancelled | PeerLost
"""How a handover ended. Each key that was reserved or sent for ends once on that side."""


class BlockCache(Protocol):
    """The blocks of a worker as bytes. A block holds the keys and values of all layers, one layer after the other."""

    blocks: int
    """Their number; ids are 0 to ``blocks - 1``."""
    block_bytes: int
    """Bytes of one block."""

    def facts(self) -> Mapping[str, str]:
        """Return the meaning of these bytes, label to text: see :data:`hal_core.handover.FACTS`."""

    def read(self, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of these blocks, uint8 ``[len(blocks), block_bytes]``, after the device work queued before
        the call. The call may wait for that work. The caller may keep the array."""

    def write(self, blocks: Sequence[int], data: np.ndarray[Any, np.dtype[np.uint8]]) -> Ticket:
        """Write ``data``, uint8 ``[len(blocks), block_bytes]``, into these blocks, each named once.

        The data may be changed when the call returns. The ticket is done when the blocks hold the data.
        """


class KvTransfer(Protocol):
    """Transfer of blocks between two workers. One thread uses it, and no call waits for a peer.

    - G29 no block is used before its seal: ``Arrived`` is returned once every block that was sent is in place with the
      contents that the sender read, and the seal's count and digest were verified; else ``Rejected``.
    - G30 no block is freed while it may be written: a handover ends only when no running write touches its blocks and
      no later message can write them. Until then its blocks are reserved for no other key. Only the newest attempt of a
      request has blocks reserved.
    - G31 the fingerprints of both sides are compared before the first byte moves. A difference is refused, and the
      error names the fact.
    - G32 each key that was reserved or sent for ends with one event on that side, in bounded time, even if the peer
      hangs, vanishes or forgets the key. This needs ``receive`` to be called four times a second, and whenever one of
      ``sockets`` is readable.
    """

    def describe(self) -> Description:
        """Return the address and the fingerprint of this side; the engine sends it to the other side."""

    def reserve(self, key: HandoverKey, blocks: Sequence[int], source: Description) -> None:
        """Decode side: reserve blocks of the own cache for the blocks that ``source`` sends for the key.

        Repeating the call has no effect. A reservation for an older attempt of the request is cancelled.

        :raises InvalidValue: naming the first fact that differs from the source's; for blocks that do not exist or are
            already reserved; for an attempt not above those known of the request. No block is reserved then.
        """

    def send(self, key: HandoverKey, to: Description, first: int, blocks: Sequence[int]) -> None:
        """Prefill side: send the contents of own ``blocks`` for the reserved blocks from number ``first``.

        Never waits. Blocks that the wire has no room for are read later, so they must not change until the key has
        ended. Without blocks it connects to the peer, whose silence is noticed from then on.

        :raises InvalidValue: naming the first fact that differs from the receiver's, before any byte is sent; for
            blocks that do not exist; after the seal; for a key that has ended here.
        """

    def seal(self, key: HandoverKey, to: Description, handover: Handover) -> None:
        """Prefill side: mark the key as complete. The seal follows all blocks sent for the key. Repeating the call has
        no effect.

        :raises InvalidValue: as ``send`` does.
        """

    def receive(self) -> Sequence[HandoverEvent]:
        """Move what can move now, and return the events since the last call. Never waits."""

    def cancel(self, key: HandoverKey) -> None:
        """Cancel the key on either side and notify the peer. ``receive`` returns ``Cancelled`` once nothing here writes
        or reads its blocks. For an unknown or ended key the call has no effect."""

    @property
    def sockets(self) -> Sequence[Any]:
        """Return what to poll (``select.poll``); when one can be read, call ``receive``."""

    def close(self) -> None:
        """End all handovers without sending more. Idempotent."""

    def __enter__(self) -> KvTransfer: ...

    def __exit__(self, *_: object) -> None: ...
