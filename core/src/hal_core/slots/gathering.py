"""Native code that makes the columns of a batch, and a request's token ids, where a device has brought some.

For the whole process: it is the same code, whichever device brings it. It gives None for what is not plain, which the
core's own code takes, or refuses with words.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

Column = bytes | array  # type: ignore[type-arg]
NativeColumns = tuple[bytes, Column, Column, Column, Column, bytes, bytes]
""":attr:`hal_core.slots.tasks.TaskBatch.native`."""

NUMBERS = ("kind", "slot", "num_computed_tokens", "num_scheduled_tokens", "first_block", "first_token")
OTHERS = ("request", "blocks", "drafts", "request_row", "role", "generated", "params", "max_tokens", "dtype")
NAMES = (*NUMBERS, *OTHERS)
"""The attributes that native code reads of a task, its request, its parameters and an array, in its order."""
FIRST = ("slots", "num_computed_tokens", "num_scheduled_tokens", "block_counts")
COLUMNS = (*FIRST, "kinds", "first_blocks", "first_tokens")
"""The columns it makes of whole numbers: columns 1 to 4, then the first three of the last."""

of_lists: Callable[..., NativeColumns | None] | None = None
of_tasks: Callable[..., tuple[NativeColumns, Any] | None] | None = None
of_ids: Callable[[object, object], tuple[bytes, int, int] | None] | None = None
"""Of a prompt and an output: both as int64, how many ids the prompt has, and the largest of all."""


def gather_with(
    lists: Callable[..., NativeColumns | None],
    tasks: Callable[..., tuple[NativeColumns, Any] | None],
    ids: Callable[[object, object], tuple[bytes, int, int] | None],
) -> None:
    """Let native code make the columns: of new requests from lists, and of tasks; and the ids of a request."""
    global of_lists, of_tasks, of_ids
    of_lists, of_tasks, of_ids = lists, tasks, ids
