"""How many drafts a slot may have, so that none is fed that could not be accepted, or whose KV has no place."""

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
    """Most drafts of each slot in the step after this one, int64 ``[slots]``, as of this step's ``update_inputs``.

    A step with ``d`` drafts feeds ``1 + d`` tokens, the first of them known already, and gives at most ``1 + d`` more.

    - ``most``: of the state (``StateConfig.max_draft_tokens``), or what the user asked for.
    - ``generated``, ``max_tokens``: tokens generated so far, and the request's most; the last one needs no draft.
    - ``known``, ``max_model_len``: tokens of prompt and output so far, and how many a slot's row holds.
    - ``covered``: tokens whose KV the blocks that the slot holds have place for.
    - ``decoding``: false while the slot is empty, is being prefilled or has ended.
    """
    room = np.minimum(max_tokens - generated, max_model_len - known) - 1
    room = np.minimum(np.minimum(room, covered - known), most)
    most_drafts: Int64s = np.maximum(room, 0).astype(np.int64, copy=False)
    most_drafts *= decoding
    return most_drafts
