"""Checks of a record: first shapes, then values. The usual record is checked on bytes, ten times as fast."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hal_core.output.record_terms import (
    ALLOWED_FINISH,
    BOOL,
    INT32,
    INT64,
    LAYOUT,
    LOGPROBS,
    OPTIONAL,
    UINT8,
    RecordFields,
    SlotStatus,
)
from hal_core.slots.fields import FinishReason
from hal_core.slots.request_ids import join_request_ids

_STATUS_BYTES, _FINISH_BYTES = bytes(SlotStatus), bytes(FinishReason)
_NATURAL_FINISH = bytes((FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))

#: Arrays that may also be int32: half of a large record is token ids, which fit.
_MAY_BE_NARROW = tuple(table[0] for table in LOGPROBS)


def is_plainly_shaped(record: RecordFields) -> bool:
    """Return whether a record without optional arrays has valid shapes: the usual case, in a third of the time."""
    if type(record.request_ids) is not tuple:
        return False
    if record.draft_counts is not None or record.drafts is not None or record.ranks is not None:
        return False
    if record.logprob_token_ids is not None or record.logprobs is not None:
        return False
    if record.draft_logprob_token_ids is not None or record.draft_logprobs is not None:
        return False
    if record.draft_ranks is not None:
        return False
    rows, tokens = (len(record.request_ids),), record.tokens
    for array, dtype in (
        (record.status, UINT8),
        (record.finish, UINT8),
        (record.positions, INT64),
        (record.counts, INT32),
        (record.first_token, BOOL),
        (tokens, INT64),
    ):
        if type(array) is not np.ndarray or array.dtype is not dtype or not array.flags.c_contiguous:
            return False
        if array.shape != rows and (array is not tokens or array.ndim != 1):
            return False
    return True


def shape_problems(record: RecordFields) -> list[str]:
    """Check types, dtypes, dimensions and lengths, on which the checks of values rely."""
    problems = []
    if type(record.request_ids) is not tuple:
        problems.append(f"request_ids is a {type(record.request_ids).__name__}, not a tuple")
        return problems
    rows = len(record.request_ids)
    drafts = getattr(record.drafts, "size", 0)
    sizes = {"rows": rows, "tokens": getattr(record.tokens, "size", 0), "drafts": drafts}
    for name, (dtype, dimensions, counted) in LAYOUT.items():
        array = getattr(record, name)
        if array is None and name in OPTIONAL:
            continue
        narrow = name in _MAY_BE_NARROW and getattr(array, "dtype", None) == INT32
        if not isinstance(array, np.ndarray) or not (array.dtype is dtype or array.dtype == dtype or narrow):
            problems.append(f"{name} is {_describe(array)}, not an array of {dtype}")
        elif array.ndim != dimensions or not array.flags.c_contiguous:
            problems.append(f"{name} is {_describe(array)}, not C-contiguous with {dimensions} dimension(s)")
        elif sizes[counted] != array.shape[0]:
            problems.append(f"{name} has length {array.shape[0]}, but there are {sizes[counted]} {counted}")
    return problems + _pair_problems(record)


def _pair_problems(record: RecordFields) -> list[str]:
    """Check optional arrays that belong together."""
    problems = []
    if (record.drafts is None) != (record.draft_counts is None):
        problems.append("drafts and draft_counts must be given together")
    for of_ids, of_logprobs, of_ranks, _ in LOGPROBS:
        ids, logprobs = getattr(record, of_ids), getattr(record, of_logprobs)
        if (logprobs is None) != (ids is None):
            problems.append(f"{of_logprobs} and {of_ids} must be given together")
        elif logprobs is not None and getattr(logprobs, "shape", None) != getattr(ids, "shape", None):
            problems.append(f"{of_logprobs} and {of_ids} differ in shape")
        elif logprobs is not None and logprobs.shape[-1] == 0:
            problems.append(f"{of_logprobs} has no column for the sampled token")
        if getattr(record, of_ranks) is not None and logprobs is None:
            problems.append(f"{of_ranks} needs {of_logprobs}")
    if record.draft_logprobs is not None and record.drafts is None:
        problems.append("draft_logprobs needs drafts")
    return problems


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}{'' if value.flags.c_contiguous else ' (not contiguous)'}"
    return type(value).__name__


def value_problems(record: RecordFields) -> list[str]:
    """Check the values in arrays of valid shapes. The plain case is checked on bytes, ten times as fast."""
    problems = []
    if type(record.step) is not int or not 0 <= record.step < 1 << 63:
        problems.append(f"step is {record.step!r}, not an int of 0 to 2**63 - 1")
    try:
        join_request_ids(record.request_ids)
    except (TypeError, ValueError) as error:
        problems.append(f"request_ids: {error}")
    if record.positions.size and np.minimum.reduce(record.positions) < 0:
        problems.append(f"positions are negative in rows {_rows(record.positions < 0)}")
    problems += optional_problems(record)
    if not _is_plain(record):
        problems += _count_problems(record)
    return problems


def _is_plain(record: RecordFields) -> bool:
    """Return whether every row has one token and no row ended otherwise than naturally."""
    rows = len(record.request_ids)
    return (
        record.tokens.size == rows
        and record.counts.tobytes() == b"\1\0\0\0" * rows
        and record.status.tobytes() == b"\1" * rows
        and not record.finish.tobytes().translate(None, _NATURAL_FINISH)
    )


def _count_problems(record: RecordFields) -> list[str]:
    problems = []
    if record.status.tobytes().translate(None, _STATUS_BYTES) or record.finish.tobytes().translate(None, _FINISH_BYTES):
        return ["status or finish holds a value unknown to its type"]
    counts, has_tokens = record.counts, record.status == SlotStatus.TOKEN
    if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != record.tokens.size:
        problems.append(f"counts add up to {counts.sum(dtype=np.int64)}, but there are {record.tokens.size} tokens")
    if (wrong := has_tokens != (counts > 0)).any():
        problems.append(f"a row must have tokens if and only if its status is TOKEN; rows {_rows(wrong)} differ")
    places = record.status.astype(np.intp) * ALLOWED_FINISH.shape[1] + record.finish
    if (wrong := ~ALLOWED_FINISH.reshape(-1)[places]).any():  # with one index: two would release the GIL
        problems.append(f"the finish reason does not match the status in rows {_rows(wrong)}")
    if (wrong := record.first_token & ~has_tokens).any():
        problems.append(f"first_token is set without a token in rows {_rows(wrong)}")
    return problems


def optional_problems(record: RecordFields) -> list[str]:
    """Check the values of the optional arrays and the messages."""
    if record.draft_counts is None and record.logprobs is None and not record.messages:
        return []
    problems = []
    if record.draft_counts is not None and record.drafts is not None:
        counts = record.draft_counts
        if (counts < 0).any() or int(counts.sum(dtype=np.int64)) != record.drafts.size:
            problems.append(
                f"draft_counts add up to {counts.sum(dtype=np.int64)}, but there are {record.drafts.size} drafts"
            )
    if record.logprob_token_ids is not None and (record.logprob_token_ids[:, 0] != record.tokens).any():
        problems.append("column 0 of logprob_token_ids is not the sampled token")
    if record.draft_logprob_token_ids is not None and (record.draft_logprob_token_ids[:, 0] != record.drafts).any():
        problems.append("column 0 of draft_logprob_token_ids is not the draft")
    for row, text in record.messages.items():
        if type(row) is not int or not 0 <= row < len(record) or type(text) is not str:
            problems.append(f"messages has {row!r}: {text!r}, not a row of 0 to {len(record) - 1} with its text")
    return problems


def _rows(wrong: NDArray[np.bool_]) -> list[int]:
    return wrong.nonzero()[0].tolist()
