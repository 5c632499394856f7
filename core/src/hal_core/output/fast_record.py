"""The record of a step with tokens only: no error, no log-probability, no request that leaves or has a role.

Fields are compared as bytes where that answers, and the parts common to all steps with one token a slot are made once.
A reduction in NumPy takes 30 times as long as a comparison of bytes. A worker that waits for its tokens makes this
record while the device idles.
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

    from .snapshot import OutputSnapshot

Arrays = np.ndarray[Any, Any]
_NATURAL = bytes((FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH))
_READ = ("accept_num", "request_serial", "draft_num", "step_idx", "stop_reason")


class _Shared(NamedTuple):
    """The common parts of all records with ``n`` rows of one token; the arrays are read-only."""

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


def fast_record(
    columns: Mapping[str, Arrays], snapshot: OutputSnapshot
) -> tuple[OutputRecord, tuple[int, ...], None] | None:
    """Return the record and each row's batch id; None for any other step, or for values out of bounds.

    The snapshot is plain, and no request of it has failed.
    """
    step, native = snapshot.step, snapshot.native_rows
    shared = _shared(len(snapshot.names))
    values: dict[str, Any] = {"step": step.number, "request_ids": snapshot.names, "messages": {}} | shared.fields
    tokens = columns["accept_tokens" if step.speculative else "sampled_token_ids"]
    found = None
    if native is not None:
        given = tokens, snapshot.order, snapshot.admission_ids, snapshot.token_limit
        found = native(*[columns[name] for name in _READ], *given)
    if found is not None:
        values["positions"], values["tokens"] = np.frombuffer(found[0], np.int64), np.frombuffer(found[1], np.int64)
        reasons = found[2]
    elif (read := _read(columns, tokens, snapshot, values, shared)) is not None:
        reasons = read
    else:
        return None
    if step.late_errors is not None and step.late_errors():
        return None
    if reasons.count(0) != len(reasons):
        if reasons.translate(None, _NATURAL):
            return None
        ends = np.frombuffer(reasons, np.uint8)
        values["finish"] = ends if values["counts"] is shared.fields["counts"] else ends * values["status"]
    return assemble(values, checked=True), shared.batch_ids, None


def _read(
    columns: Mapping[str, Arrays], tokens: Arrays, snapshot: OutputSnapshot, values: dict[str, Any], shared: _Shared
) -> bytes | None:
    """Put the rows' positions and tokens into ``values``, and their counts and status unless all have one token. Return
    their reasons as bytes; None if a value is out of bounds."""
    order = snapshot.order
    counts, serials, drafts, steps, reasons = (columns[name].reshape(-1)[order] for name in _READ)
    if serials.tobytes() != snapshot.admission_ids.tobytes():
        return None
    if drafts.tobytes() != shared.zeros and beyond(drafts.astype(np.int64), snapshot.max_draft_tokens + 1):
        return None
    if counts.tobytes() == shared.ones:
        given = tokens.reshape(-1)[:: tokens.shape[1]][order]
    else:
        most = snapshot.max_accept if snapshot.step.speculative else 1
        if beyond(counts.astype(np.int64), most + 1):
            return None
        width = np.arange(tokens.shape[1])
        # With one index: two at once would release the GIL.
        given = tokens.reshape(-1)[order[:, None] * tokens.shape[1] + width][width < counts[:, None]]
        values["counts"], values["status"] = counts, np.minimum(counts, 1).astype(np.uint8)  # TOKEN is 1, NONE is 0
    positions = values["positions"] = steps - counts
    values["tokens"] = given
    if positions.view(np.uint32)[1::2].tobytes() != shared.zeros or beyond(given, snapshot.token_limit):  # upper halves
        return None
    ends: bytes = reasons.tobytes()
    if ends.count(0) == len(ends):
        return ends[: len(order)]
    if beyond(reasons.astype(np.int64), 1 << 8):
        return None
    ended: bytes = reasons.astype(np.uint8).tobytes()
    return ended


def beyond(numbers: Arrays, limit: int) -> bool:
    """Return whether a number, int64, is negative or not below ``limit``: one reduction, as negative ones are large if
    unsigned."""
    return bool(np.maximum.reduce(numbers.view(np.uint64), initial=0) >= limit)
