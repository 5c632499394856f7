"""The record: the output of one step for the engine, the same for every mode of decoding (G24, G25).

Plain, speculative, top-k, first-token and preempted output are all rows of an :class:`OutputRecord`. Parts that a mode
lacks are ``None`` or a count of zero. Tokens contain no sentinel values: the state of a row is its typed
:class:`SlotStatus`.

``n`` is the number of rows, ``t`` the number of tokens in all rows together, ``K`` the requested number of top
log-probabilities. Arrays are little-endian and C-contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hal_core.errors import InvalidValue
from hal_core.output.record_checks import is_plainly_shaped, optional_problems, shape_problems, value_problems
from hal_core.output.record_terms import INT32, INT64, LAYOUT, LOGPROBS, RecordFields, SlotStatus
from hal_core.slots.fields import FinishReason

__all__ = ["OutputRecord", "OutputRow", "SlotStatus", "assemble", "narrowed"]


class OutputRow(NamedTuple):
    """One request's part of a record. The arrays are views of the record's."""

    request_id: str
    status: SlotStatus
    finish: FinishReason
    position: int  #: index of the first token within the request's generated tokens
    tokens: NDArray[np.int64]  #: int64[count]
    first_token: bool
    drafts: NDArray[np.int64] | None  #: int64[draft_count]
    logprob_token_ids: NDArray[np.int64] | NDArray[np.int32] | None  #: int64 or int32[count, K+1]
    logprobs: NDArray[np.float32] | None  #: float32[count, K+1], nats
    ranks: NDArray[np.int32] | None  #: int32[count]
    message: str  #: text of an error, else empty
    draft_logprob_token_ids: NDArray[np.int64] | NDArray[np.int32] | None  #: int64 or int32[draft_count, K+1]
    draft_logprobs: NDArray[np.float32] | None  #: float32[draft_count, K+1], nats, the draft model's
    draft_ranks: NDArray[np.int32] | None  #: int32[draft_count]


@dataclass(frozen=True, eq=False)
class OutputRecord(RecordFields):
    """One step's output, rows in batch-id order. Validates itself; an error lists every problem found.

    A record owns its arrays: neither its creator nor a sink may write to them, and some are read-only. Its fields:
    :class:`hal_core.output.record_terms.RecordFields`.
    """

    def __post_init__(self) -> None:
        problems = [] if is_plainly_shaped(self) else shape_problems(self)
        if problems := problems or value_problems(self):
            raise InvalidValue(
                f"{len(problems)} problem(s): " + "; ".join(problems),
                cure="build the record with arrays of the documented dtypes and lengths",
                hook="save_output",
                argument="record",
            )

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal contents; floats are compared bit for bit (a NaN log-probability equals
        itself)."""
        if not isinstance(other, OutputRecord):
            return NotImplemented
        return all(_same(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by value, so records have no hash

    def rows(self) -> Iterator[OutputRow]:
        """Yield each request's part in row order; arrays are views."""
        ends, draft_ends = _ends(self.counts), _ends(self.draft_counts)
        optional = [(getattr(self, name), LAYOUT[name][2]) for table in LOGPROBS for name in table[:3]]
        start = draft_start = 0
        for row, request_id in enumerate(self.request_ids):
            end, draft_end = ends[row], draft_ends[row] if draft_ends else 0
            own = {"tokens": slice(start, end), "drafts": slice(draft_start, draft_end)}
            ids, logprobs, ranks, *of_drafts = [None if array is None else array[own[unit]] for array, unit in optional]
            yield OutputRow(
                request_id,
                SlotStatus(self.status[row]),
                FinishReason(self.finish[row]),
                int(self.positions[row]),
                self.tokens[start:end],
                bool(self.first_token[row]),
                None if self.drafts is None else self.drafts[draft_start:draft_end],
                ids,
                logprobs,
                ranks,
                self.messages.get(row, ""),
                *of_drafts,
            )
            start, draft_start = end, draft_end

    def deliveries(self) -> list[tuple[str, int, int]]:
        """Return ``(request_id, first_position, count)`` of every row with an event, for G19."""
        eventful = (self.status != SlotStatus.NONE) | (self.finish != FinishReason.NONE)
        return [
            (self.request_ids[row], int(self.positions[row]), int(self.counts[row]))
            for row in eventful.nonzero()[0].tolist()
        ]


def _ends(counts: NDArray[np.int32] | None) -> list[int]:
    return [] if counts is None else np.cumsum(counts, dtype=np.int64).tolist()


def _same(mine: object, other: object) -> bool:
    if isinstance(mine, np.ndarray) and isinstance(other, np.ndarray):
        if mine.dtype != other.dtype and {mine.dtype, other.dtype} <= {INT32, INT64}:
            return np.array_equal(mine, other)
        return mine.shape == other.shape and mine.dtype == other.dtype and mine.tobytes() == other.tobytes()
    return type(mine) is type(other) and mine == other


def narrowed(ids: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int64] | NDArray[np.int32]:
    """Return the ids as int32 if they fit, as token ids do."""
    if ids.dtype == INT32:
        return ids
    if ids.size and (np.minimum.reduce(ids, None) < -(1 << 31) or np.maximum.reduce(ids, None) >= 1 << 31):
        return ids
    return ids.astype(INT32)


def assemble(values: dict[str, Any], *, checked: bool) -> OutputRecord:
    """Return a record of ``values``, a dictionary with every field, whose shapes and dtypes the caller has checked.

    For decoders: it checks only the values; if the caller has ``checked`` them, only those of the optional parts. The
    record keeps the dictionary: 0.4 us; fields set one by one take 2.3.
    """
    record = object.__new__(OutputRecord)
    object.__setattr__(record, "__dict__", values)
    if problems := optional_problems(record) if checked else value_problems(record):
        raise InvalidValue("; ".join(problems), hook="save_output", argument="record")
    return record
