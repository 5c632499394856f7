"""Plan of a step's prompt pieces, made on the host: packed pieces, and the keys that they see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hal_core import ENTERING, FEEDING

from .sampling import Want

if TYPE_CHECKING:
    from hal_engine.stepping import PlannedStep

_TOKENS, _MOST_PIECES = (32, 128, 256, 512, 1024, 2048), 32
_STEP, _TIMES, _CHUNK, _MOST_KEYS = 4, 16, 512, 1 << 17
"""Captured numbers of keys grow by a factor: to so many times the tokens; for a chunk of a prompt, to so many."""
_ALIGNED = 16
CHUNK = _TOKENS[-1]
"""Prompt tokens of a step that the runner prefers on a GPU."""


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


NOTHING = Size(0, 0, 0)


class Plan(NamedTuple):
    """The host's upload for a step's pieces: one int32 array, which the device expands to tokens and keys.

    - ``last`` ``[slots]``: the packed token whose logits are wanted of a slot, or -1.
    - ``token_ends``, ``key_ends`` ``[slots + 1]``: where each piece ends among the tokens, and the keys; 0 first.
    - ``slots``, ``starts`` ``[slots]``: the slot of each piece, and the position of its first token.
    """

    last: Any
    token_ends: Any
    key_ends: Any
    slots: Any
    starts: Any

    @classmethod
    def of(cls, line: Any, slots: int) -> Plan:  # noqa: ANN401 (an array or a tensor)
        """The parts of a line of numbers."""
        found, begin = [], 0
        for length in (slots, slots + 1, slots + 1, slots, slots):
            found.append(line[begin : begin + length])
            begin += length
        return cls(*found)


def pieces_of(step: PlannedStep, wants: dict[int, Want]) -> list[Piece]:
    """Prompt pieces of steps. ``wants``: by slot, how its request is sampled; set when a request enters."""
    tasks, pieces = step.tasks.plain, list[Piece]()
    if not step.tasks.requests:
        return pieces
    columns = (tasks["kinds"], tasks["slots"], step.tasks.requests)
    counts = (tasks["num_computed_tokens"], tasks["num_scheduled_tokens"])
    for kind, slot, request, start, length in zip(*columns, *counts, strict=True):
        if kind in ENTERING:
            wants[slot] = Want.of(request.params)
        if kind in FEEDING:
            pieces.append(Piece(slot, start, start + length, start + length >= request.total))
    return pieces


def captured_sizes(slots: int, longest: int) -> list[Size]:
    """Return the captured sizes for so many slots of so many tokens at most, smallest first: prompts that begin, and
    pieces that see several times their number of keys."""
    sizes, most = list[Size](), slots * longest
    for tokens in _TOKENS:
        limit = _TIMES * tokens if tokens < _CHUNK else _MOST_KEYS
        keys = tokens
        while keys == tokens or (keys <= limit and keys // _STEP < most):
            sizes.append(Size(tokens, keys, min(slots, _MOST_PIECES)))
            keys *= _STEP
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


def packed(pieces: Sequence[Piece], slots: int) -> array[int]:
    """Return the plan of some pieces (:class:`Plan`). Without NumPy, which releases the GIL for long arrays."""
    last, token_ends, key_ends = [-1] * slots, [0], [0]
    for piece in pieces:
        token_ends.append(token_ends[-1] + piece.stop - piece.start)
        key_ends.append(key_ends[-1] + piece.stop)
        if piece.gives:
            last[piece.slot] = token_ends[-1] - 1
    rest = slots - len(pieces)
    ends = [*token_ends, *token_ends[-1:] * rest, *key_ends, *key_ends[-1:] * rest]
    whose = [*(piece.slot for piece in pieces), *[0] * rest, *(piece.start for piece in pieces), *[0] * rest]
    return array("i", [*last, *ends, *whose])
