"""The record: what one step tells the engine, the same for every mode of decoding (G24, G25).

Plain, speculative, top-k, first-token and preempted output are all rows of an :class:`OutputRecord`; what a
mode does not have is ``None`` or a count of zero. There are no sentinel values inside the tokens: what became
of a row is its typed :class:`SlotStatus`.

``n`` is the number of rows, ``t`` the number of tokens in all rows together, ``K`` the number of top
log-probabilities asked for. Arrays are little-endian and C-contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hal_core.errors import InvalidValue

UINT8, INT32, INT64 = np.dtype("uint8"), np.dtype("<i4"), np.dtype("<i8")
FLOAT32, BOOL = np.dtype("<f4"), np.dtype("bool")


class SlotStatus(IntEnum):
    """What became of a row's request in this step."""

    NONE = 0  #: nothing to report, for example a chunk of a prefill that is not finished
    TOKEN = 1  #: at least one token; the only status whose rows have tokens
    PREEMPTED = 2  #: taken out of its slot, to be scheduled again
    ABORTED = 3  #: ended by the engine's wish
    ERROR = 4  #: ended by an error; ``messages`` may hold its text
    RECOVERED = 5  #: stopped by the recovery of its worker


class FinishReason(IntEnum):
    """Why a request is over with this row; ``NONE`` while it is not."""

    NONE = 0
    STOP = 1  #: an end-of-sequence token or a stop sequence
    LENGTH = 2
    ABORT = 3
    ERROR = 4


#: Which finish reasons a status may carry, bool[status, finish]. A row that ended may still report NONE here
#: when the finish was told before, but an abort or an error never looks like a natural end, nor the reverse.
ALLOWED_FINISH: NDArray[np.bool_] = np.array(
    [
        # NONE  STOP  LENGTH ABORT ERROR
        [True, True, True, False, False],  # NONE
        [True, True, True, False, False],  # TOKEN
        [True, False, False, False, False],  # PREEMPTED
        [True, False, False, True, False],  # ABORTED
        [True, False, False, False, True],  # ERROR
        [True, True, False, False, True],  # RECOVERED
    ]
)
_STATUS_BYTES, _FINISH_BYTES = bytes(SlotStatus), bytes(FinishReason)
_NATURAL_FINISH = bytes((FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))

#: The arrays of a record: dtype, number of dimensions, what the first dimension counts. Ids may be int32 as well.
LAYOUT: dict[str, tuple[np.dtype[Any], int, str]] = {
    "status": (UINT8, 1, "rows"),
    "finish": (UINT8, 1, "rows"),
    "positions": (INT64, 1, "rows"),
    "counts": (INT32, 1, "rows"),
    "tokens": (INT64, 1, "tokens"),
    "first_token": (BOOL, 1, "rows"),
    "draft_counts": (INT32, 1, "rows"),
    "drafts": (INT64, 1, "drafts"),
    "logprob_token_ids": (INT64, 2, "tokens"),
    "logprobs": (FLOAT32, 2, "tokens"),
    "ranks": (INT32, 1, "tokens"),
}
OPTIONAL = ("draft_counts", "drafts", "logprob_token_ids", "logprobs", "ranks")
#: Arrays that may be int32 too: half of a large record is token ids, which fit.
_MAY_BE_NARROW = ("logprob_token_ids",)


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


@dataclass(frozen=True, eq=False)
class OutputRecord:
    """One step's output, rows in batch-id order. Validates itself; an error lists every problem found.

    A record owns its arrays: who builds one does not write to them afterwards.
    """

    step: int  #: the step's number, 0 to 2**63 - 1
    request_ids: tuple[str, ...]  #: n ids, not empty, without NUL characters
    status: NDArray[np.uint8]  #: uint8[n], :class:`SlotStatus`
    finish: NDArray[np.uint8]  #: uint8[n], :class:`FinishReason`
    positions: NDArray[np.int64]  #: int64[n], index of the row's first token in the request's generated tokens
    counts: NDArray[np.int32]  #: int32[n], number of tokens of the row, always (G24)
    tokens: NDArray[np.int64]  #: int64[t], the rows' tokens one after the other
    first_token: NDArray[np.bool_]  #: bool[n], the row reports a prefill's first token
    draft_counts: NDArray[np.int32] | None = None  #: int32[n]
    drafts: NDArray[np.int64] | None = None  #: int64[sum(draft_counts)]
    #: int64 or int32[t, K+1], column 0 the sampled token, unused -1
    logprob_token_ids: NDArray[np.int64] | NDArray[np.int32] | None = None
    logprobs: NDArray[np.float32] | None = None  #: float32[t, K+1], natural logarithms, unused -inf
    ranks: NDArray[np.int32] | None = None  #: int32[t], rank of the sampled token
    messages: Mapping[int, str] = field(default_factory=dict)  #: row -> text of an error

    def __post_init__(self) -> None:
        problems = [] if _is_plainly_shaped(self) else _shape_problems(self)
        if problems := problems or _value_problems(self):
            raise InvalidValue(
                f"{len(problems)} problem(s): " + "; ".join(problems),
                cure="build the record with arrays of the documented dtypes and lengths",
                hook="save_output",
                argument="record",
            )

    def __len__(self) -> int:
        return len(self.request_ids)

    def __eq__(self, other: object) -> bool:
        """Whether the two say the same; floats bit for bit (so a NaN log-probability equals itself)."""
        if not isinstance(other, OutputRecord):
            return NotImplemented
        return all(_same(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by value, so records have no hash

    def rows(self) -> Iterator[OutputRow]:
        """Give each request's part in row order; arrays are views."""
        ends, draft_ends = _ends(self.counts), _ends(self.draft_counts)
        start = draft_start = 0
        for row, request_id in enumerate(self.request_ids):
            end, draft_end = ends[row], draft_ends[row] if draft_ends else 0
            yield OutputRow(
                request_id,
                SlotStatus(self.status[row]),
                FinishReason(self.finish[row]),
                int(self.positions[row]),
                self.tokens[start:end],
                bool(self.first_token[row]),
                None if self.drafts is None else self.drafts[draft_start:draft_end],
                None if self.logprob_token_ids is None else self.logprob_token_ids[start:end],
                None if self.logprobs is None else self.logprobs[start:end],
                None if self.ranks is None else self.ranks[start:end],
                self.messages.get(row, ""),
            )
            start, draft_start = end, draft_end

    def deliveries(self) -> list[tuple[str, int, int]]:
        """``(request_id, first_position, count)`` of every row that tells something; what G19 accounts for."""
        told = (self.status != SlotStatus.NONE) | (self.finish != FinishReason.NONE)
        return [
            (self.request_ids[row], int(self.positions[row]), int(self.counts[row]))
            for row in told.nonzero()[0].tolist()
        ]


def _ends(counts: NDArray[np.int32] | None) -> list[int]:
    return [] if counts is None else np.cumsum(counts, dtype=np.int64).tolist()


def _same(mine: object, other: object) -> bool:
    if isinstance(mine, np.ndarray) and isinstance(other, np.ndarray):
        if mine.dtype != other.dtype and {mine.dtype, other.dtype} <= {INT32, INT64}:
            return np.array_equal(mine, other)
        return mine.shape == other.shape and mine.dtype == other.dtype and mine.tobytes() == other.tobytes()
    return type(mine) is type(other) and mine == other


#: The last ids that were joined. A batch often keeps its requests from step to step, and each record's ids are
#: needed twice: to check it and to encode it. One assignment replaces it, so threads need no lock.
_last_joined: tuple[tuple[str, ...], str] = ((), "")


def join_request_ids(request_ids: tuple[str, ...]) -> str:
    """Return the ids joined by NUL characters, the form in which frames carry them.

    Raises ValueError or TypeError when an id is empty, holds a NUL character or is no string.
    """
    global _last_joined
    last_ids, joined = _last_joined
    if request_ids is last_ids:
        return joined
    joined = _join_and_check(request_ids)
    _last_joined = (request_ids, joined)
    return joined


def _join_and_check(request_ids: tuple[str, ...]) -> str:
    joined = "\0".join(request_ids)
    if request_ids and joined.count("\0") != len(request_ids) - 1:
        raise ValueError("an id holds a NUL character")
    if request_ids and (not joined or joined[0] == "\0" or joined[-1] == "\0" or "\0\0" in joined):
        raise ValueError("an id is empty")
    return joined


def narrowed(ids: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int64] | NDArray[np.int32]:
    """The ids with 32 bits each if they fit, as token ids do."""
    if ids.dtype == INT32:
        return ids
    if ids.size and (np.minimum.reduce(ids, None) < -(1 << 31) or np.maximum.reduce(ids, None) >= 1 << 31):
        return ids
    return ids.astype(INT32)


def assemble(
    step: int,
    request_ids: tuple[str, ...],
    status: NDArray[np.uint8],
    finish: NDArray[np.uint8],
    positions: NDArray[np.int64],
    counts: NDArray[np.int32],
    tokens: NDArray[np.int64],
    first_token: NDArray[np.bool_],
    options: Mapping[str, Any],
    *,
    checked: bool,
) -> OutputRecord:
    """Return a record of all its fields whose dtypes, dimensions and lengths the caller has seen to.

    For decoders: it checks the values alone, and of the optional parts alone where the caller has ``checked`` the rest.
    ``options`` has every field that is not named here. Setting fields one by one would cost twice as much.
    """
    record = object.__new__(OutputRecord)
    values = {
        "step": step,
        "request_ids": request_ids,
        "status": status,
        "finish": finish,
        "positions": positions,
        "counts": counts,
        "tokens": tokens,
        "first_token": first_token,
        **options,
    }
    object.__setattr__(record, "__dict__", values)
    if problems := _optional_problems(record) if checked else _value_problems(record):
        raise InvalidValue("; ".join(problems), hook="save_output", argument="record")
    return record


def _is_plainly_shaped(record: OutputRecord) -> bool:
    """Whether a record without optional arrays has sound shapes: the usual case, in a third of the time."""
    if type(record.request_ids) is not tuple:
        return False
    rows = (len(record.request_ids),)
    return (
        (record.draft_counts is None and record.drafts is None and record.ranks is None)
        and (record.logprob_token_ids is None and record.logprobs is None)
        and _is_array(record.status, UINT8, rows)
        and _is_array(record.finish, UINT8, rows)
        and _is_array(record.positions, INT64, rows)
        and _is_array(record.counts, INT32, rows)
        and _is_array(record.first_token, BOOL, rows)
        and _is_array(record.tokens, INT64, None)
    )


def _is_array(array: object, dtype: np.dtype[Any], shape: tuple[int] | None) -> bool:
    return (
        type(array) is np.ndarray
        and array.dtype is dtype
        and (array.shape == shape if shape is not None else array.ndim == 1)
        and array.flags.c_contiguous
    )


def _shape_problems(record: OutputRecord) -> list[str]:
    """Types, dtypes, dimensions and lengths: what must hold before any value is looked at."""
    problems = []
    if type(record.request_ids) is not tuple:
        problems.append(f"request_ids is a {type(record.request_ids).__name__}, not a tuple")
        return problems
    rows = len(record.request_ids)
    sizes = {"rows": rows, "tokens": getattr(record.tokens, "size", 0), "drafts": -1}
    for name, (dtype, dimensions, counted) in LAYOUT.items():
        array = getattr(record, name)
        if array is None and name in OPTIONAL:
            continue
        narrow = name in _MAY_BE_NARROW and getattr(array, "dtype", None) == INT32
        if not isinstance(array, np.ndarray) or not (array.dtype is dtype or array.dtype == dtype or narrow):
            problems.append(f"{name} is {_describe(array)}, not an array of {dtype}")
        elif array.ndim != dimensions or not array.flags.c_contiguous:
            problems.append(f"{name} is {_describe(array)}, not C-contiguous with {dimensions} dimension(s)")
        elif sizes[counted] not in (-1, array.shape[0]):
            problems.append(f"{name} has length {array.shape[0]}, there are {sizes[counted]} {counted}")
    return problems + _pair_problems(record)


def _pair_problems(record: OutputRecord) -> list[str]:
    """Optional arrays that only make sense together."""
    problems = []
    if (record.drafts is None) != (record.draft_counts is None):
        problems.append("drafts and draft_counts must be given together")
    if (record.logprobs is None) != (record.logprob_token_ids is None):
        problems.append("logprobs and logprob_token_ids must be given together")
    elif record.logprobs is not None and record.logprobs.shape != getattr(record.logprob_token_ids, "shape", None):
        problems.append("logprobs and logprob_token_ids differ in shape")
    elif record.logprobs is not None and record.logprobs.shape[-1] == 0:
        problems.append("logprobs has no column for the sampled token")
    if record.ranks is not None and record.logprobs is None:
        problems.append("ranks needs logprobs")
    return problems


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}{'' if value.flags.c_contiguous else ' (not contiguous)'}"
    return type(value).__name__


def _value_problems(record: OutputRecord) -> list[str]:
    """Values within arrays of the right shapes. The plain case is checked on bytes: an order cheaper."""
    problems = []
    if type(record.step) is not int or not 0 <= record.step < 1 << 63:
        problems.append(f"step is {record.step!r}, not an int of 0 to 2**63 - 1")
    try:
        join_request_ids(record.request_ids)
    except (TypeError, ValueError) as error:
        problems.append(f"request_ids: {error}")
    if record.positions.size and np.minimum.reduce(record.positions) < 0:
        problems.append(f"positions are negative in rows {_rows(record.positions < 0)}")
    problems += _optional_problems(record)
    if not _is_plain(record):
        problems += _count_problems(record)
    return problems


def _is_plain(record: OutputRecord) -> bool:
    """Whether every row has one token and none ended otherwise than naturally."""
    rows = len(record.request_ids)
    return (
        record.tokens.size == rows
        and record.counts.tobytes() == b"\1\0\0\0" * rows
        and record.status.tobytes() == b"\1" * rows
        and not record.finish.tobytes().translate(None, _NATURAL_FINISH)
    )


def _count_problems(record: OutputRecord) -> list[str]:
    problems = []
    if record.status.tobytes().translate(None, _STATUS_BYTES) or record.finish.tobytes().translate(None, _FINISH_BYTES):
        return ["status or finish holds a value that its type does not know"]
    counts, has_tokens = record.counts, record.status == SlotStatus.TOKEN
    if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != record.tokens.size:
        problems.append(f"counts add up to {counts.sum(dtype=np.int64)}, there are {record.tokens.size} tokens")
    if (wrong := has_tokens != (counts > 0)).any():
        problems.append(f"a row has tokens if and only if its status is TOKEN; not so in rows {_rows(wrong)}")
    if (wrong := ~ALLOWED_FINISH[record.status, record.finish]).any():
        problems.append(f"the finish reason does not go with the status in rows {_rows(wrong)}")
    if (wrong := record.first_token & ~has_tokens).any():
        problems.append(f"first_token is set without a token in rows {_rows(wrong)}")
    return problems


def _optional_problems(record: OutputRecord) -> list[str]:
    if record.draft_counts is None and record.logprobs is None and not record.messages:
        return []
    problems = []
    if record.draft_counts is not None and record.drafts is not None:
        counts = record.draft_counts
        if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != record.drafts.size:
            problems.append(
                f"draft_counts add up to {counts.sum(dtype=np.int64)}, there are {record.drafts.size} drafts"
            )
    if record.logprob_token_ids is not None and (record.logprob_token_ids[:, 0] != record.tokens).any():
        problems.append("column 0 of logprob_token_ids is not the sampled token")
    for row, text in record.messages.items():
        if type(row) is not int or not 0 <= row < len(record) or type(text) is not str:
            problems.append(f"messages has {row!r}: {text!r}, not a row of 0 to {len(record) - 1} with its text")
    return problems


def _rows(wrong: NDArray[np.bool_]) -> list[int]:
    return wrong.nonzero()[0].tolist()
