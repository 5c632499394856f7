"""Several handovers between two workers at once: each has its own blocks, its own seal and its own end (G29, G30)."""

from __future__ import annotations

import pytest
from hal_core.handover.protocol import Arrived, Cancelled, Handover, HandoverKey

from .fixtures.kv_handover import KvHandover, ends, kinds
from .harness.guarantees import guarantee
from .kit import Kit

MOVES: dict[HandoverKey, tuple[list[int], list[int]]] = {
    HandoverKey("a", 0): ([0, 1, 2], [9, 4, 0]),
    HandoverKey("b", 0): ([3, 4], [7, 2]),
    HandoverKey("c", 3): ([5, 6, 7], [1, 3, 8]),
    HandoverKey("d", 0): ([8, 9], [5, 6]),
}
"""Handover to the blocks that are sent and those that are promised: together all blocks of both caches."""
KEYS = list(MOVES)
SENT = [block for sent, _ in MOVES.values() for block in sent]
PROMISED = [block for _, promised in MOVES.values() for block in promised]


def begun(transfers: KvHandover) -> None:
    """Reserve all, and send all blocks but the last of each, one of each in turn."""
    for key, (_, promised) in MOVES.items():
        transfers.reserve(key, promised)
    for turn in range(2):
        for key, (sent, _) in MOVES.items():
            if turn < len(sent) - 1:
                transfers.send(key, turn, sent[turn : turn + 1])
                transfers.look(1)


def ended(transfers: KvHandover, key: HandoverKey) -> Handover:
    """Send the last block of a handover, and seal it."""
    sent, _ = MOVES[key]
    transfers.send(key, len(sent) - 1, sent[-1:])
    return transfers.seal(key, len(sent), b"state of " + key.request_id.encode())


def check_ends(transfers: KvHandover, seals: dict[HandoverKey, Handover]) -> None:
    """Wait until each of these has arrived, once on each side and with its own seal."""
    __tracebackhide__ = True
    sides = {"decode": transfers.d, "prefill": transfers.p}
    transfers.until(lambda: all(ends(side.told, key) for side in sides.values() for key in seals), "the ends of all")
    transfers.look()
    for name, side in sides.items():
        for key, handover in seals.items():
            found = ends(side.told, key)
            assert found == [Arrived(key, handover)], f"{key} has ended as {found} on the {name} side"


@guarantee(29)
@pytest.mark.parametrize("order", [KEYS, KEYS[::-1], [*KEYS[2:], *KEYS[:2]]], ids=["first", "last", "middle"])
def test_g29_several_handovers_at_once_keep_their_blocks_apart(kit: Kit, order: list[HandoverKey]) -> None:
    with KvHandover(kit) as transfers:
        begun(transfers)
        seals = {key: ended(transfers, key) for key in order}
        check_ends(transfers, seals)
        transfers.check_moved(SENT, PROMISED)


@guarantee(30, also=(29, 32))
@pytest.mark.parametrize("side", ["d", "p"])
@pytest.mark.parametrize("gone", KEYS, ids=lambda key: key.request_id)
def test_g30_of_several_handovers_one_is_cancelled_alone(kit: Kit, gone: HandoverKey, side: str) -> None:
    with KvHandover(kit) as transfers:
        begun(transfers)
        getattr(transfers, side).transfer.cancel(gone)
        transfers.until(lambda: bool(ends(transfers.d.told, gone)), f"the end of {gone}, cancelled by {side}")
        assert kinds(transfers.d.told) == [Cancelled], f"one of four was cancelled, and the ends are {transfers.d.told}"
        again = HandoverKey(gone.request_id, gone.attempt + 1)
        sent, promised = MOVES[gone]
        transfers.reserve(again, promised)  # its blocks are free again, beside those of the others
        seals = {key: ended(transfers, key) for key in KEYS if key != gone}
        transfers.send(again, 0, sent)
        seals[again] = transfers.seal(again, len(sent), b"again")
        check_ends(transfers, seals)
        transfers.check_moved(SENT, PROMISED)
