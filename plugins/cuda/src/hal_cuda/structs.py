"""Structures shared by host and kernels: parameters of launches, entries, the table of staged requests."""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
from hal_core.devices import DYNAMIC, ROW_FIELDS

THREADS = 128
"""Threads a block: enough for an 8 KB row in four vector loads each, small enough for thousands of short rows."""
PIECE = 16 << 10
"""Bytes of a token row that one block of threads writes; ``PIECE`` of kernels/enter.cu."""
ENTRY = Struct("<8q8q")
"""One request: ``Entry`` of kernels/enter.cu. The host table's row of its slot comes first."""
HANDED = ("next_tokens", "step_idx", "draft_num", "draft_tokens")
"""Additional fields that a hand-off changes: ``handed`` of that file."""
CHUNK_NUMBERS = 5
"""Length of a chunk's ``numbers``: :class:`hal_cuda.staged_requests.Chunk`."""
PLACE = 4
"""Columns of the table of staged requests: :class:`hal_cuda.staged_requests.StagedRequests`."""


def struct(*fields: tuple[Any, ...]) -> np.dtype[np.void]:
    """Return a struct that a kernel takes by value, with the compiler's own alignment."""
    return np.dtype(np.dtype([*fields], align=True), metadata={"struct": True})


PLAN = struct(
    ("memory", "<u8"),
    ("block", "<u8"),
    ("spread", "<u8"),
    ("writes", "<u4"),
    ("records", "<u4"),
    ("fields", "<u4"),
    ("record_bytes", "<u4"),
    ("slots_at", "<u4"),
    ("records_at", "<u4"),
    ("payload_at", "<u8"),
)
FILL = np.dtype(
    [
        ("dst", "<u8"),
        ("cycle", "<u8"),
        ("nbytes", "<u4"),
        ("n0", "<u4"),
        ("n1", "<u4"),
        ("step0", "<i8"),
        ("step1", "<i8"),
    ],
    align=True,
)
SMALL_BYTES = 1024
SMALL = struct(("dst", "<u8"), ("nbytes", "<u4"), ("unused", "<u4"), ("data", "u1", (SMALL_BYTES,)))
STRIDED = struct(
    ("dst", "<u8"),
    ("src", "<u8"),
    ("element", "<u4"),
    ("unused", "<u4"),
    ("shape", "<u4", (4,)),
    ("to", "<i8", (4,)),
    ("from", "<i8", (4,)),
    ("count", "<u8"),
)
COPY_OUT = np.dtype([("to", "<u8"), ("from", "<u8"), ("nbytes", "<u8")])
HOLD = np.dtype([("flag", "<u8")])
ROW = np.dtype([(name, "<u8") for name in ("base", "stride", "cycle", "size")])
ENTER = struct(
    ("entries", "<u8"),
    ("blocks", "<u8"),
    ("memory", "<u8"),
    ("spread", "<u8"),
    ("dynamic", "<u8", (len(DYNAMIC),)),
    ("handed", "<u8", (len(HANDED),)),
    ("fields", "<u4"),
    ("rows_at", "<u4"),
    ("drafts", "<u4"),
    ("step_at", "<u4"),
    ("rows", ROW, (len(ROW_FIELDS),)),
)
FEW_BYTES = 3 << 10
"""Bytes of entries and block ids that are part of the launch; a launch holds 4 KB. ``FEW`` of kernels/enter.cu."""
ENTER_FEW = struct(("enter", ENTER), ("given", "u1", (FEW_BYTES,)))
