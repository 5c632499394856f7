"""Raw reads and writes of device memory without the hooks, so that no test checks a method with itself.

Reads are one ``copy_out``; writes are one hand-made plan given to ``submit``. The hooks under test are never used here.
The plan is written from its documented format (:data:`hal_core.memory.plan.WRITE`), not by the plan builder.
``test_primitives.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.errors import TicketTimeout
from hal_core.memory.plan import WRITE, WritePlan
from hal_core.memory.views import ByteRange

if TYPE_CHECKING:
    from hal_core.contract.device import Device
    from hal_core.memory.views import Memory
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

POISON = 0xA5
"""The byte written where no data may be read: as a token or length it is far out of bounds."""

PATIENCE = 60.0
"""Seconds after which a wait that should end counts as hung."""


def arrive(ticket: Ticket, what: str = "work on a running stream") -> None:
    """Wait for work that must succeed; a timeout or an error becomes a failed assertion."""
    __tracebackhide__ = True
    try:
        ticket.wait(PATIENCE)
    except Exception as error:
        raise AssertionError(f"{what}: its ticket {_outcome(error)}") from error


def _outcome(error: Exception) -> str:
    late = isinstance(error, TicketTimeout)
    return f"is not done after {PATIENCE:g} s: {error!r}" if late else f"raises {error!r}"


def drain(stream: Stream) -> None:
    """Wait for a stream whose work must succeed; a timeout or an error becomes a failed assertion."""
    __tracebackhide__ = True
    try:
        stream.synchronize(PATIENCE)
    except Exception as error:
        raise AssertionError(f"a stream {_outcome(error)}") from error


def read(device: Device, memory: Memory, stream: Stream) -> Bytes:
    """Return all bytes of a block, after the work that is now on ``stream``."""
    copied = device.copy_out(memory, [ByteRange(0, memory.nbytes)], stream)
    arrive(copied, "a copy to the host")
    return np.array(copied.data[0], np.uint8)


def put(device: Device, memory: Memory, runs: Sequence[tuple[int, bytes]], stream: Stream) -> Ticket:
    """Write ``(offset, bytes)`` runs, which do not overlap, in stream order, without waiting."""
    rows = np.zeros(len(runs), WRITE)
    payload = b"".join(data for _, data in runs)
    at = 0
    for row, (offset, data) in zip(rows, runs, strict=True):
        row["dst"], row["source"], row["nbytes"] = offset, at, len(data)
        at += len(data)
    plan = WritePlan(memory, rows[rows["nbytes"] > 0], [np.frombuffer(payload, np.uint8).copy()])
    return device.submit(plan, stream)


def write(device: Device, memory: Memory, offset: int, data: Bytes, stream: Stream) -> None:
    """Write bytes and wait for the write."""
    arrive(put(device, memory, [(offset, data.tobytes())], stream), "a plan")


def poisoned(nbytes: int) -> Bytes:
    """Return bytes that must never be read."""
    return np.full(nbytes, POISON, np.uint8)
