"""Native functions for batches, token ids and the rows of a step, registered by a device that has them.

They serve the whole process, since the code is the same whichever device registers it. They return None for input that
is not plain; the core's own code then reads it, or refuses it with an error text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NUMBERS = ("kind", "slot", "num_computed_tokens", "num_scheduled_tokens", "first_block", "first_token")
OTHERS = ("request", "blocks", "drafts", "request_row")
TASK_NAMES = (*NUMBERS, *OTHERS)
"""The attributes that native code reads of a task and its request, in its order."""

of_lists: Callable[..., tuple[bytes, bytes] | None] | None = None
"""Build a batch's ``ints`` and ``rows`` from lists of new requests."""
of_tasks: Callable[..., tuple[bytes, bytes, tuple[Any, ...]] | None] | None = None
"""Build the same from tasks, and return their requests too."""
of_ids: Callable[[object, object], tuple[bytes, int, int] | None] | None = None
"""Return a prompt and an output as int64, the number of ids of the prompt, and the largest id."""
within: Callable[[Any, int], bool] | None = None
"""Return whether all ids of an array, int32 or int64, are at least 0 and below a limit."""
of_rows: Callable[..., tuple[bytes, bytes, bytes] | None] | None = None
"""Read the rows of a usual step, as :func:`hal_core.output.fast_record.rows_of` does, all as bytes."""


def gather_with(
    lists: Callable[..., tuple[bytes, bytes] | None],
    tasks: Callable[..., tuple[bytes, bytes, tuple[Any, ...]] | None],
    ids: Callable[[object, object], tuple[bytes, int, int] | None],
    rows: Callable[..., tuple[bytes, bytes, bytes] | None],
    bounded: Callable[[Any, int], bool],
) -> None:
    """Register native code for batches from lists, for batches from tasks, for a request's token ids, for the rows of a
    usual step, and for a check of many ids."""
    global of_lists, of_tasks, of_ids, of_rows, within
    of_lists, of_tasks, of_ids, of_rows, within = lists, tasks, ids, rows, bounded
