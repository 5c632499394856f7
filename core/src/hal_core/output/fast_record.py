"""The record of the usual step, in which every slot gets one token and reports at most its end.

Its fields are compared as bytes, and the parts common to all such records are made once. A reduction in NumPy takes 30
times as long as a comparison of bytes. A worker that waits for its tokens makes this record while the device idles.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..slots import native_columns
from ..slots.fields import FinishReason
from .record_terms import OPTIONAL, SlotStatus
from .records import OutputRecord, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..slots.step import Step

Arrays = np.ndarray[Any, Any]
_NATURAL = bytes((FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))


class _Shared(NamedTuple):
    """The common parts of all records with ``n`` rows; the arrays are read-only."""

    ones: bytes
    zeros: bytes
    fields: dict[str, Any]
    batch_ids: tuple[int, ...]


@cache
def _shared(n: int) -> _Shared:
    counts, status = np.ones(n, np.int32), np.full(n, SlotStatus.TOKEN, np.uint8)
    finish, first = np.zeros(n, np.uint8), np.zeros(n, np.bool_)
    for array in (counts, status, finish, first):
        array.flags.writeable = False
    fields = {"status": status, "finish": finish, "counts": counts, "first_token": first} | dict.fromkeys(OPTIONAL)
    return _Shared(counts.tobytes(), bytes(counts.nbytes), fields, tuple(range(n)))


def beyond(tokens: Arrays, limit: int) -> bool:
    """Return whether a token id is negative or not below ``limit``: one reduction, as negative ids are large if
    unsigned."""
    return bool(np.maximum.reduce(tokens.view(np.uint64), initial=0) >= limit)


def usual_record(
    columns: Mapping[str, Arrays], step: Step, order: Arrays, admission_ids: Arrays, names: tuple[str, ...], limit: int
) -> tuple[OutputRecord, tuple[int, ...], None] | None:
    """Return the record and each row's batch id; None for any other step, or for values out of bounds.

    ``order``, ``admission_ids``, ``names``: the indices of the step's slots, all held, and their requests; ``columns``:
    their fields; ``limit``: token ids are below it.
    """
    tokens = columns["accept_tokens" if step.speculative else "sampled_token_ids"]
    native = native_columns.of_rows
    read: Callable[..., tuple[Any, Any, bytes] | None] = native or rows_of
    found = read(*[columns[name] for name in _READ], tokens, order, admission_ids, limit)
    if found is None or (step.late_errors is not None and step.late_errors()):
        return None
    positions, given, reasons = found
    values: dict[str, Any] = {"step": step.number, "request_ids": names, "messages": {}}
    shared = _shared(len(names))
    values |= shared.fields
    if native is not None:  # bytes
        positions, given = np.frombuffer(positions, np.int64), np.frombuffer(given, np.int64)
    values["positions"], values["tokens"] = positions, given
    if reasons.count(0) != len(reasons):
        if reasons.translate(None, _NATURAL):
            return None
        values["finish"] = np.frombuffer(reasons, np.uint8)
    return assemble(values, checked=True), shared.batch_ids, None


_READ = ("accept_num", "request_serial", "draft_num", "step_idx", "stop_reason")


def rows_of(
    counts: Arrays,
    serials: Arrays,
    drafts: Arrays,
    steps: Arrays,
    reasons: Arrays,
    tokens: Arrays,
    order: Arrays,
    admission_ids: Arrays,
    limit: int,
) -> tuple[Arrays, Arrays, bytes] | None:
    """Return positions and tokens, int64, and reasons, uint8, of a step's rows; None if one is not usual.

    A usual row has one token, below ``limit``, no draft, its slot's admission, and a position of at most 32 bits. The
    first arrays are the fields ``[slots, width]``; ``order`` and ``admission_ids`` are the rows', int64. Native code of
    a device may replace it (:data:`hal_core.slots.native_columns.of_rows`).
    """
    ones, zeros = _shared(len(order))[:2]
    if counts.reshape(-1)[order].tobytes() != ones or drafts.reshape(-1)[order].tobytes() != zeros:
        return None
    if serials.reshape(-1)[order].tobytes() != admission_ids.tobytes():
        return None
    positions = steps.reshape(-1)[order] - 1
    if positions.view(np.uint32)[1::2].tobytes() != zeros:  # the upper halves
        return None
    given, ends = tokens.reshape(-1)[:: tokens.shape[1]][order], reasons.reshape(-1)[order]
    if beyond(given, limit):
        return None
    ended = ends.tobytes()
    if ended.count(0) == len(ended):
        return positions, given, ended[: len(order)]
    return None if beyond(ends.astype(np.int64), 1 << 8) else (positions, given, ends.astype(np.uint8).tobytes())
