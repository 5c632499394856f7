"""What a step feeds of prompts, planned on the host: pieces packed one after the other, and the keys that they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from hal_core import ENTERING, TaskKind

from .sampling import Want

if TYPE_CHECKING:
    from hal.stepping import PlannedStep

Ints = np.ndarray[Any, np.dtype[np.int32]]
_FEEDING = (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK)
_TOKENS, _TIMES, _MOST_KEYS, _MOST_PIECES = (32, 128, 256, 512, 1024, 2048), (1, 4, 16), 16384, 32
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
    """Room for packed prompts: so many tokens, keys that they may see, and pieces."""

    tokens: int
    keys: int
    pieces: int

    def numbers(self, slots: int) -> int:
        """How many numbers a plan of this size is (:class:`Parts`)."""
        return slots + 2 * (self.pieces + 1) + 2 * self.tokens + 2 * self.keys


NOTHING = Size(0, 0, 0)


class Parts(NamedTuple):
    """A plan, int32 and in one line: what the device needs of packed prompts. What pads it has slot 0, position -1.

    - ``last`` ``[slots]``: the packed token whose logits are wanted of a slot, or -1.
    - ``token_ends``, ``key_ends`` ``[pieces + 1]``: where each piece ends among the tokens, and the keys; 0 first.
    - ``slots``, ``positions`` ``[tokens]``; ``key_slots``, ``key_positions`` ``[keys]``.
    """

    last: Any
    token_ends: Any
    key_ends: Any
    slots: Any
    positions: Any
    key_slots: Any
    key_positions: Any

    @classmethod
    def of(cls, line: Any, size: Size, slots: int) -> Parts:  # noqa: ANN401 (an array or a tensor)
        """The parts of a line of numbers."""
        lengths = (slots, *(size.pieces + 1,) * 2, *(size.tokens,) * 2, *(size.keys,) * 2)
        found, begin = [], 0
        for length in lengths:
            found.append(line[begin : begin + length])
            begin += length
        return cls(*found)


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


def captured_sizes(slots: int, longest: int) -> list[Size]:
    """The sizes that are captured for so many slots of so many tokens at most, smallest first: prompts that begin, and
    pieces that see several times their number of keys."""
    sizes, most = [], slots * longest
    for tokens in _TOKENS:
        for times in _TIMES:
            keys = tokens * times
            if times == 1 or (keys <= _MOST_KEYS and keys // 4 < most):
                sizes.append(Size(tokens, keys, min(slots, _MOST_PIECES)))
        if tokens >= most:
            break
    return sizes


def size_of(pieces: Sequence[Piece], captured: Sequence[Size]) -> Size:
    """The captured size that holds some pieces with the least to compute; where none does, their own, rounded up."""
    tokens = sum(piece.stop - piece.start for piece in pieces)
    keys = sum(piece.stop for piece in pieces)
    fits = [one for one in captured if one.tokens >= tokens and one.keys >= keys and one.pieces >= len(pieces)]
    if fits:
        return min(fits, key=lambda size: (size.tokens, size.keys))
    return Size(-(-tokens // _ALIGNED) * _ALIGNED, -(-keys // _ALIGNED) * _ALIGNED, len(pieces))


def packed(pieces: Sequence[Piece], size: Size, slots: int, out: Ints) -> None:
    """Write the plan of some pieces into ``out``, int32 ``[size.numbers(slots)]``."""
    out.fill(-1)
    plan = Parts.of(out, size, slots)
    plan.slots[:], plan.key_slots[:] = 0, 0
    plan.token_ends[0] = plan.key_ends[0] = token = key = 0
    for number, piece in enumerate(pieces):
        count = piece.stop - piece.start
        plan.slots[token : token + count] = piece.slot
        plan.positions[token : token + count] = np.arange(piece.start, piece.stop)
        plan.key_slots[key : key + piece.stop] = piece.slot
        plan.key_positions[key : key + piece.stop] = np.arange(piece.stop)
        token, key = token + count, key + piece.stop
        plan.token_ends[number + 1], plan.key_ends[number + 1] = token, key
        if piece.gives:
            plan.last[piece.slot] = token - 1
    plan.token_ends[len(pieces) + 1 :], plan.key_ends[len(pieces) + 1 :] = token, key
