"""What a step feeds of prompts, planned on the host: pieces packed one after the other, and the keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core import ENTERING, TaskKind

from .sampling import Want

if TYPE_CHECKING:
    from hal.stepping import PlannedStep

Ints = np.ndarray[Any, np.dtype[np.int32]]
_FEEDING = (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK)
_TOKENS, _TIMES, _MOST_KEYS = (32, 128, 256, 512, 1024, 2048), (1, 4, 16), 16384
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start`` to ``stop`` of the request in ``slot``; ``gives``: its prompt ends here, so a token follows."""

    slot: int
    start: int
    stop: int
    gives: bool


@dataclass(frozen=True, slots=True)
class Size:
    """Room for packed prompts: so many tokens, and keys that they may see."""

    tokens: int
    keys: int


NOTHING = Size(0, 0)


def pieces_of(step: PlannedStep, wants: dict[int, Want]) -> list[Piece]:
    """The pieces of prompts that a step feeds. ``wants``: by slot how its request is sampled; taken over from who
    enters."""
    tasks, pieces = step.tasks.plain, []
    columns = (tasks["kinds"], tasks["slots"], step.tasks.requests)
    counts = (tasks["num_computed_tokens"], tasks["num_scheduled_tokens"])
    for kind, slot, request, start, length in zip(*columns, *counts, strict=True):
        if kind in ENTERING:
            wants[slot] = Want.of(request.params)
        if kind in _FEEDING:
            pieces.append(Piece(slot, start, start + length, start + length >= request.total))
    return pieces


def captured_sizes(most: int) -> list[Size]:
    """The sizes that are captured where slots hold ``most`` tokens together, smallest first: prompts that begin, and
    pieces that see several times their number of keys."""
    sizes = []
    for tokens in _TOKENS:
        for times in _TIMES:
            keys = tokens * times
            if times == 1 or (keys <= _MOST_KEYS and keys // 4 < most):
                sizes.append(Size(tokens, keys))
        if tokens >= most:
            break
    return sizes


def size_of(pieces: Sequence[Piece], captured: Sequence[Size]) -> Size:
    """The captured size that holds some pieces with the least to compute; where none does, their own, rounded up."""
    tokens = sum(piece.stop - piece.start for piece in pieces)
    keys = sum(piece.stop for piece in pieces)
    fits = [size for size in captured if size.tokens >= tokens and size.keys >= keys]
    if fits:
        return min(fits, key=lambda size: (size.tokens, size.keys))
    return Size(-(-tokens // _ALIGNED) * _ALIGNED, -(-keys // _ALIGNED) * _ALIGNED)


def packed(pieces: Sequence[Piece], size: Size, slots: int, out: Ints) -> None:
    """Write what the device needs of some pieces into ``out``, int32 ``[slots + 2 * tokens + 2 * keys]``: by slot the
    packed token whose logits are wanted, or -1; each token's slot and position; each key's slot and position. What pads
    them has slot 0 and position -1."""
    out.fill(-1)
    last = out[:slots]
    token_slots, positions, key_slots, key_positions = parts(out, size, slots)
    token_slots[:], key_slots[:] = 0, 0
    token = key = 0
    for piece in pieces:
        count = piece.stop - piece.start
        token_slots[token : token + count] = piece.slot
        positions[token : token + count] = np.arange(piece.start, piece.stop)
        key_slots[key : key + piece.stop] = piece.slot
        key_positions[key : key + piece.stop] = np.arange(piece.stop)
        token, key = token + count, key + piece.stop
        if piece.gives:
            last[piece.slot] = token - 1


def parts(out: Any, size: Size, slots: int) -> tuple[Any, Any, Any, Any]:  # noqa: ANN401 (an array or a tensor)
    """Of such an array its tokens' slots and positions, and its keys' slots and positions."""
    begin, middle = slots, slots + 2 * size.tokens
    tokens, keys = out[begin:middle], out[middle : middle + 2 * size.keys]
    return tokens[: size.tokens], tokens[size.tokens :], keys[: size.keys], keys[size.keys :]
