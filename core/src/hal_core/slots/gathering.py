"""Native code that makes the buffers of a batch, and a request's token ids, where a device has brought some.

For the whole process: it is the same code, whichever device brings it. It gives None for what is not plain, which the
core's own code takes, or refuses with words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NUMBERS = ("kind", "slot", "num_computed_tokens", "num_scheduled_tokens", "first_block", "first_token")
OTHERS = ("request", "blocks", "drafts", "request_row", "dtype")
NAMES = (*NUMBERS, *OTHERS)
"""The attributes that native code reads of a task, its request and an array, in its order."""

of_lists: Callable[..., tuple[bytes, bytes] | None] | None = None
"""Of new requests in lists: a batch's ``ints`` and ``rows``."""
of_tasks: Callable[..., tuple[bytes, bytes, tuple[Any, ...]] | None] | None = None
"""Of tasks: the same, and their requests."""
of_ids: Callable[[object, object], tuple[bytes, int, int] | None] | None = None
"""Of a prompt and an output: both as int64, how many ids the prompt has, and the largest of all."""


def gather_with(
    lists: Callable[..., tuple[bytes, bytes] | None],
    tasks: Callable[..., tuple[bytes, bytes, tuple[Any, ...]] | None],
    ids: Callable[[object, object], tuple[bytes, int, int] | None],
) -> None:
    """Let native code make the buffers: of new requests from lists, and of tasks; and the ids of a request."""
    global of_lists, of_tasks, of_ids
    of_lists, of_tasks, of_ids = lists, tasks, ids
