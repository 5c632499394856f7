"""Liars about steps of long rows and many tokens. They lie in the reference, which devices without a kernel run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from . import Patch, liar


@liar(9, "a stop sequence may begin in the prompt")
class StopsFromThePrompt(Patch):
    """The comparison does not know where the prompt ends."""

    seam = "stop sequences of a step"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Everything counts as generated."""
        return lambda fields, slot, total, generated, sizes: true(fields, slot, total, total, sizes)


class ShortStops(Patch):
    """Base: a step never meets stop sequences of more than ``most`` tokens."""

    seam = "stop sequences of a step"
    most: ClassVar[int]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Hide the long ones."""

        def ends(fields: Any, slot: int, total: int, generated: int, sizes: Any) -> Any:  # noqa: ANN401 (the core's)
            lengths = np.where(fields["stop_seqs_len"] > cls.most, 0, fields["stop_seqs_len"])
            return true({**fields, "stop_seqs_len": lengths}, slot, total, generated, sizes)

        return ends


@liar(9, "stop sequences of more than 8 tokens are never met")
class ShortStopsOnly(ShortStops):
    """A kernel with room for 8."""

    most = 8


class FirstAppended(Patch):
    """Base: of a step's accepted tokens the first ``most`` are appended."""

    seam = "several tokens of a step"
    most: ClassVar[int]

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the row empty behind them."""

        def append(fields: Any, column: Any, slots: Any, known: Any) -> None:  # noqa: ANN401 (the core's)
            true(fields, column, slots, known)
            for slot in np.asarray(slots).tolist():
                begin, count = int(known[slot]), int(column["accept_num"][slot])
                fields["token_ids"][slot, begin + min(count, cls.most) : begin + count] = -1

        return append


@liar(9, "of more than 8 accepted tokens the first 8 are appended")
class EightAppended(FirstAppended):
    """One warp's worth."""

    most = 8


@liar(9, "positions of a step are kept in 16 bits")
class StepPositionsInSixteenBits(Patch):
    """Enough for the models of the day."""

    seam = "one token of a step"

    @classmethod
    def lie(cls, true: Callable[..., Any]) -> Callable[..., Any]:
        """Cut them."""
        return lambda fields, column, slots, known, given: true(fields, column, slots, known & 0xFFFF, given)
