"""What all ranks of a group must have alike (G14): terms, each a label ("layout") and a text (its digest), in a block.

The block has the same size whatever its terms, so that ranks that differ can still exchange it. In a collective with
different sizes a library may abort, or leave stale bytes without an error (gloo did both).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidValue

MOST_TERMS = 10
"""Terms that one block has place for."""
DIGEST_BYTES, LABEL_BYTES, TEXT_BYTES = 16, 24, 152
BLOCK_BYTES = MOST_TERMS * (DIGEST_BYTES + LABEL_BYTES + TEXT_BYTES)


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The terms of a rank, label and text, in order. Texts are compared by digest; errors show them, cut if long."""

    items: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, items: Mapping[str, str]) -> SharedConfig:
        """Return the terms of a mapping, in its order; at most :data:`MOST_TERMS`."""
        if len(items) > MOST_TERMS:
            raise InvalidValue(f"{len(items)} terms, but a block holds {MOST_TERMS}", argument="terms")
        return cls(tuple(items.items()))

    def block(self) -> bytes:
        """Return the terms as :data:`BLOCK_BYTES` bytes."""
        parts = []
        for label, text in self.items:
            raw = text.encode()
            shown = raw if len(raw) <= TEXT_BYTES else raw[: TEXT_BYTES - 3] + b"..."
            parts.append(hashlib.sha256(raw).digest()[:DIGEST_BYTES])
            parts.append(label.encode()[:LABEL_BYTES].ljust(LABEL_BYTES, b"\0"))
            parts.append(shown.ljust(TEXT_BYTES, b"\0"))
        return b"".join(parts).ljust(BLOCK_BYTES, b"\0")

    def digest(self) -> bytes:
        """Return 32 bytes that differ whenever a term differs (SHA-256)."""
        return hashlib.sha256(repr(self.items).encode()).digest()


def differences(blocks: Mapping[int, bytes]) -> list[str]:
    """Return the differences between some ranks' blocks, each as one phrase with both texts; empty when all agree.

    ``blocks`` maps a global rank to its block. Every rank with the same blocks finds the same differences.
    """
    first, *others = sorted(blocks)
    size = DIGEST_BYTES + LABEL_BYTES + TEXT_BYTES
    found = []
    for at in range(0, BLOCK_BYTES, size):
        ours = blocks[first][at : at + size]
        for rank in others:
            theirs = blocks[rank][at : at + size]
            if ours[: DIGEST_BYTES + LABEL_BYTES] != theirs[: DIGEST_BYTES + LABEL_BYTES]:
                found.append(
                    f"{_label(ours) or _label(theirs)}: rank {first} has {_text(ours)!r}, rank {rank} {_text(theirs)!r}"
                )
                break
    return found


def _label(term: bytes) -> str:
    return term[DIGEST_BYTES : DIGEST_BYTES + LABEL_BYTES].rstrip(b"\0").decode(errors="replace")


def _text(term: bytes) -> str:
    return term[DIGEST_BYTES + LABEL_BYTES :].rstrip(b"\0").decode(errors="replace")
