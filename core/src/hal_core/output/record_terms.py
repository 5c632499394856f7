"""Terms of a record: the values of its rows and its arrays, shared by records and frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

UINT8, INT32, INT64 = np.dtype("uint8"), np.dtype("<i4"), np.dtype("<i8")
FLOAT32, BOOL = np.dtype("<f4"), np.dtype("bool")


class SlotStatus(IntEnum):
    """The state of a row's request after this step."""

    NONE = 0  #: no event, for example an unfinished chunk of a prefill
    TOKEN = 1  #: at least one token; the only status whose rows have tokens
    PREEMPTED = 2  #: removed from its slot, to be scheduled again
    ABORTED = 3  #: ended by the engine
    ERROR = 4  #: ended by an error; ``messages`` may hold its text
    RECOVERED = 5  #: stopped by the recovery of its worker


#: Which finish reasons a status may have, bool[status, finish]. A row that ended may report NONE here if the finish was
#: reported earlier. An abort or an error never looks like a natural end, nor the reverse.
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
#: The arrays of a record: dtype, number of dimensions, the unit of the first dimension. Ids may be int32 as well.
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
    "draft_logprob_token_ids": (INT64, 2, "drafts"),
    "draft_logprobs": (FLOAT32, 2, "drafts"),
    "draft_ranks": (INT32, 1, "drafts"),
}
#: A table of log-probabilities: token ids, log-probabilities and ranks, of the tokens in the last array.
LOGPROBS = (
    ("logprob_token_ids", "logprobs", "ranks", "tokens"),
    ("draft_logprob_token_ids", "draft_logprobs", "draft_ranks", "drafts"),
)
OPTIONAL = ("draft_counts", "drafts", *(name for table in LOGPROBS for name in table[:3]))


@dataclass(frozen=True, eq=False)
class RecordFields:
    """The contents of a record, unchecked."""

    step: int  #: the step's number, 0 to 2**63 - 1
    request_ids: tuple[str, ...]  #: n ids, not empty, without NUL characters
    status: NDArray[np.uint8]  #: uint8[n], :class:`SlotStatus`
    finish: NDArray[np.uint8]  #: uint8[n], :class:`FinishReason`
    positions: NDArray[np.int64]  #: int64[n], index of the row's first token in the request's generated tokens
    counts: NDArray[np.int32]  #: int32[n], number of tokens of the row, always (G24)
    tokens: NDArray[np.int64]  #: int64[t], all rows' tokens in row order
    first_token: NDArray[np.bool_]  #: bool[n], the row reports a prefill's first token
    draft_counts: NDArray[np.int32] | None = None  #: int32[n]
    drafts: NDArray[np.int64] | None = None  #: int64[sum(draft_counts)]
    #: int64 or int32[t, K+1], column 0 the sampled token, unused -1
    logprob_token_ids: NDArray[np.int64] | NDArray[np.int32] | None = None
    logprobs: NDArray[np.float32] | None = None  #: float32[t, K+1], natural logarithms, unused -inf
    ranks: NDArray[np.int32] | None = None  #: int32[t], rank of the sampled token
    messages: Mapping[int, str] = field(default_factory=dict)  #: row -> text of an error
    #: int64 or int32[drafts, K+1], the draft model's, column 0 the draft, unused -1
    draft_logprob_token_ids: NDArray[np.int64] | NDArray[np.int32] | None = None
    draft_logprobs: NDArray[np.float32] | None = None  #: float32[drafts, K+1], natural logarithms, unused -inf
    draft_ranks: NDArray[np.int32] | None = None  #: int32[drafts], rank of the draft

    def __len__(self) -> int:
        return len(self.request_ids)
