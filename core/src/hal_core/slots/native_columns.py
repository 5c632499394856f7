"""Native functions of a device for batches, token ids and the rows of a step.

They return None for input that is not plain; the core's own code then reads it, or refuses it with an error text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REQUEST_NAMES = ("request_id", "params", "prompt", "output", "extra", "role")
"""The attributes that native code reads of a request to admit, in its order."""
NUMBERS = ("kind", "slot", "num_computed_tokens", "num_scheduled_tokens", "first_block", "first_token")
OTHERS = ("request", "blocks", "drafts", "packed")
TASK_NAMES = (*NUMBERS, *OTHERS)
"""The attributes that native code reads of a task and its request, in its order."""


@dataclass(frozen=True, slots=True)
class NativeColumns:
    """Native functions; a device that has them has this object as its attribute ``native_columns``."""

    of_tasks: Callable[..., tuple[bytes, bytes, tuple[Any, ...]] | None]
    """Build a batch's ``ints`` and ``rows`` from tasks, and return their requests too."""
    of_ids: Callable[[object, object], tuple[bytes, int, int] | None]
    """Return a prompt and an output as int64, the number of ids of the prompt, and the largest id."""
    of_requests: Callable[[Any, type, int, int, int], tuple[list[str], list[Any], list[bytes]] | None]
    """Return the names, the parameters and the ids, as int32 bytes, of new requests of a type without extra fields and
    of the role MIXED. All ids are at least 0 and below the first number, all lengths from 1 and below the second. It
    stops behind the request with which there are as many ids as the third."""
    of_rows: Callable[..., tuple[bytes, bytes, bytes] | None]
    """Read the rows of a usual step, each of one token and without drafts: positions, tokens and reasons as bytes."""


def native_of(device: object) -> NativeColumns | None:
    """Return the native functions of a device, if it has some."""
    found: NativeColumns | None = getattr(device, "native_columns", None)
    return found
