"""Two transfers between two caches in device memory: a prefill side, a decode side, and their events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.handover.device_blocks import DeviceBlocks
from hal_core.handover.messages import pack, unpack
from hal_core.handover.protocol import (
    Handover,
    HandoverEvent,
    HandoverKey,
    KvTransfer,
    PeerLost,
)
from hal_core.handover.transfer import BlockTransfer, Patience

from ..harness import backdoor
from ..harness.backdoor import Bytes
from .memory_wire import MemoryNet

if TYPE_CHECKING:
    from ..kit import Kit

BLOCKS, BLOCK_BYTES = 10, 192
FACTS: Mapping[str, str] = {
    "contract": "1.0",
    "checkpoint": "c0ffee",
    "dtype": "float32",
    "byte order": "little",
    "block size": "16",
    "layers": "2",
    "kv heads": "4",
    "tp shard": "0/1",
    "head dim": "8",
    "layout": "heads, tokens",
    "slot table": "5107",
}
LONG, SHORT = 1000.0, 0.1
"""Seconds after which a silent peer is lost: for tests without and with a lost peer."""


HANGS = 15.0
"""Seconds after which a missing event fails the test."""
BEAT = 0.002
"""Seconds between two heartbeats of a waiting sender, so that lost messages are noticed at once."""


class DeviceCache(DeviceBlocks):
    """Blocks in the memory of the device under test, as a runner with its cache there has them."""

    def __init__(self, kit: Kit, facts: Mapping[str, str], seed: int) -> None:
        self._kit, self.stream = kit, kit.device.stream()
        self.memory = kit.device.allocate(BLOCKS * BLOCK_BYTES)
        super().__init__(kit.bound, self.memory, BLOCKS, BLOCK_BYTES, facts, self.stream)
        self.filled = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)
        backdoor.write(kit.device, self.memory, 0, self.filled.reshape(-1), self.stream)

    def held(self) -> Bytes:
        """Return the current contents of the memory, ``[blocks, bytes]``."""
        return backdoor.read(self._kit.device, self.memory, self.stream).reshape(BLOCKS, BLOCK_BYTES)


class End:
    """One side."""

    def __init__(
        self, kit: Kit, net: MemoryNet, name: str, seed: int, facts: Mapping[str, str], silence: float
    ) -> None:
        self.cache = DeviceCache(kit, facts, seed)
        support = kit.subject.support
        self.transfer: KvTransfer = (
            support.transfer(kit.device, self.cache, silence)
            if support.transfers
            else BlockTransfer(self.cache, net.wire(f"memory://{name}"), Patience(silence=silence, beat=BEAT))
        )
        self.told: list[HandoverEvent] = []

    def look(self) -> list[HandoverEvent]:
        """Add the transfer's new events."""
        self.told += self.transfer.receive()
        return self.told


class KvHandover:
    """``p`` sends and ``d`` receives. A context manager; ``net`` is the network between hal's own transfers."""

    def __init__(self, kit: Kit, *, silence: float = LONG, d_facts: Mapping[str, str] = FACTS) -> None:
        self.net = MemoryNet()
        self.p = End(kit, self.net, "p", 1, FACTS, silence)
        self.d = End(kit, self.net, "d", 2, d_facts, silence)

    def __enter__(self) -> KvHandover:
        return self

    def __exit__(self, *_: object) -> None:
        self.p.transfer.close()
        self.d.transfer.close()

    def reserve(self, key: HandoverKey, blocks: Sequence[int]) -> None:
        """Let ``d`` reserve blocks."""
        self.d.transfer.reserve(key, blocks, self.p.transfer.describe())

    def send(self, key: HandoverKey, first: int, blocks: Sequence[int]) -> None:
        """Let ``p`` send blocks."""
        self.p.transfer.send(key, self.d.transfer.describe(), first, blocks)

    def seal(self, key: HandoverKey, blocks: int, state: bytes = b"state") -> Handover:
        """Let ``p`` seal the key after so many blocks."""
        handover = Handover(blocks, 16 * blocks - 3, 7, (8, 9), state)
        self.p.transfer.seal(key, self.d.transfer.describe(), handover)
        return handover

    def look(self, rounds: int = 6) -> None:
        """Let both sides process messages, without waiting."""
        for _ in range(rounds):
            self.p.look()
            self.d.look()

    def until(self, come: Callable[[], bool], what: str) -> None:
        """Let both sides process messages until ``come()``; its arrival is asserted, not its time."""
        __tracebackhide__ = True
        self._until((self.p, self.d), come, what)

    def until_one(self, side: End, come: Callable[[], bool], what: str) -> None:
        """Do the same if the other side is gone."""
        __tracebackhide__ = True
        self._until((side,), come, what)

    def _until(self, sides: Sequence[End], come: Callable[[], bool], what: str) -> None:
        __tracebackhide__ = True
        end = time.monotonic() + HANGS
        while not come():
            for side in sides:
                side.look()
            told = f"prefill side {self.p.told}, decode side {self.d.told}"
            assert time.monotonic() < end, f"{what} did not come within {HANGS:g} s; events: {told}"
            time.sleep(0.001)

    def change(self, kind: type, edit: Callable[[Any, bytearray], None]) -> None:
        """Change messages of a kind in transit, in place."""

        def deliver(_from: int, _to: int, buffer: bytes) -> Sequence[bytes]:
            session, number, message, data = unpack(buffer)
            if not isinstance(message, kind):
                return (buffer,)
            changed = bytearray(data)
            edit(message, changed)
            return (pack(message, bytes(changed), session=session, number=number),)

        self.net.deliver = deliver

    def check_untouched(self, blocks: Sequence[int], why: str) -> None:
        """Assert that these blocks of ``d`` still have their initial contents."""
        __tracebackhide__ = True
        held = self.d.cache.held()
        for block in blocks:
            assert np.array_equal(held[block], self.d.cache.filled[block]), f"{why}: block {block} was written"

    def check_moved(self, sent: Sequence[int], promised: Sequence[int]) -> None:
        """Assert that the contents of ``sent`` in ``p`` are in ``promised`` of ``d``, and that no other block of ``d``
        was written."""
        __tracebackhide__ = True
        held = self.d.cache.held()
        for ours, theirs in zip(sent, promised, strict=True):
            same = np.array_equal(held[theirs], self.p.cache.filled[ours])
            assert same, f"after Arrived, block {theirs} differs from block {ours} of the prefill side"
        self.check_untouched([block for block in range(BLOCKS) if block not in promised], "after Arrived")


def ends(told: Sequence[HandoverEvent], key: HandoverKey) -> list[HandoverEvent]:
    """Return the events by which a key has ended."""
    return [event for event in told if key in (event.keys if isinstance(event, PeerLost) else (event.key,))]


def kinds(told: Sequence[HandoverEvent]) -> list[type]:
    """Return the kinds of events."""
    return [type(event) for event in told]
