"""Columns for native code of batches with other tasks than new requests.

Nearly every step of a decoder has one batch with requests that enter a slot, new or handed over, and requests that stay
and get a piece of their prompt or more blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain

from .admission import AdmittedRequest
from .fields import SplitRole
from .task import TaskKind

HAND_OFF = int(TaskKind.REMOTE_PREFILL)


def more_of(
    plain: Mapping[str, list[int]], requests: Sequence[AdmittedRequest], drafts: Sequence[Sequence[int]]
) -> bytes | None:
    """Return columns of n int32 each, one after the other: ``kinds``, ``first_blocks``, ``first_tokens``, the number of
    each task's drafts; then all drafts, int32.

    They are made from a batch's columns as lists, its requests and their drafts. None for a batch that native code
    leaves to the core: with requests that leave, without requests, or with handoffs that no state can take.
    :func:`hal_core.slots.checks.problems` has the error texts for those.
    """
    kinds = plain["kinds"]
    if not kinds or max(kinds) > HAND_OFF:
        return None
    for kind, request in zip(kinds, requests, strict=True):
        if kind == HAND_OFF and (
            request.role is SplitRole.PREFILL or request.generated + 1 >= request.params.max_tokens
        ):
            return None
    flat = list(chain.from_iterable(drafts))
    if flat and set(map(type, flat)) != {int}:
        return None
    counts = list(map(len, drafts))
    try:
        columns = [array("i", one) for one in (kinds, plain["first_blocks"], plain["first_tokens"], counts, flat)]
    except OverflowError:
        return None
    return b"".join([column.tobytes() for column in columns])
