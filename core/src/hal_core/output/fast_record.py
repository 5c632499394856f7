"""The record of the usual step, in which every slot gets one token and reports at most its end.

Its fields are compared as bytes, and the parts common to all such records are made once. A reduction in NumPy takes 30
times as long as a comparison of bytes. A worker that waits for its tokens makes this record while the device idles.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..slots.fields import FinishReason
from .record_terms import OPTIONAL, SlotStatus
from .records import OutputRecord, assemble

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    ones, zeros, fields, batch_ids = _shared(len(order))
    if columns["accept_num"].reshape(-1)[order].tobytes() != ones:
        return None
    if columns["request_serial"].reshape(-1)[order].tobytes() != admission_ids.tobytes():
        return None
    if columns["draft_num"].reshape(-1)[order].tobytes() != zeros:
        return None
    if step.late_errors is not None and step.late_errors():
        return None
    positions = columns["step_idx"].reshape(-1)[order] - 1
    if (
        positions.view(np.uint32)[1::2].tobytes() != zeros
    ):  # the upper halves: not zero for negative positions, or for positions beyond any request
        return None
    values: dict[str, Any] = {"step": step.number, "request_ids": names, "positions": positions, "messages": {}}
    values |= fields
    reasons = columns["stop_reason"].reshape(-1)[order]
    if reasons.tobytes().count(0) != reasons.nbytes:
        values["finish"] = reasons.astype(np.uint8)
        if values["finish"].tobytes().translate(None, _NATURAL):
            return None
    given = columns["accept_tokens" if step.speculative else "sampled_token_ids"]
    values["tokens"] = given.reshape(-1)[:: given.shape[1]][order]
    if beyond(values["tokens"], limit):
        return None
    return assemble(values, checked=True), batch_ids, None
