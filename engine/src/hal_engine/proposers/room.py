"""Limits of drafts per slot, so that no draft is fed that could not be accepted, or whose KV has no room."""

from __future__ import annotations

from typing import Any

import numpy as np

Int64s = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


def draft_room(
    most: int,
    *,
    generated: Int64s,
    max_tokens: Int64s,
    known: Int64s,
    max_model_len: int,
    covered: Int64s,
    decoding: Bools,
) -> Int64s:
    """Return the most drafts of each slot in the next step, int64 ``[slots]``, as of this step's ``update_inputs``.

    A step with ``d`` drafts feeds ``1 + d`` tokens, the first of them already known, and gives at most ``1 + d`` more.

    - ``most``: of the state (``StateConfig.max_draft_tokens``), or the user's limit.
    - ``generated``, ``max_tokens``: tokens generated so far, and the request's most; the last one needs no draft.
    - ``known``, ``max_model_len``: tokens of prompt and output so far, and the length of a slot's row.
    - ``covered``: tokens whose KV has room in the slot's blocks.
    - ``decoding``: false while the slot is empty, is being prefilled or has ended.
    """
    room = np.minimum(max_tokens - generated, max_model_len - known) - 1
    room = np.minimum(np.minimum(room, covered - known), most)
    most_drafts: Int64s = np.maximum(room, 0).astype(np.int64, copy=False)
    most_drafts *= decoding
    return most_drafts
