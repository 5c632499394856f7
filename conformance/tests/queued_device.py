"""The asynchronous example device, which the kit's tests open by a factory: its streams can be held."""

import sys
from abc import ABC
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "queue"))

from hal_conformance.harness.lies import lay_below
from hal_conformance.liars.faults import FAULTS, DelayedCopies, lay
from hal_example_queue.conformance import QueueSupport as QueueSupport
from hal_example_queue.device import QueueDevice
from hal_example_queue.device import QueuePrimitives as QueuePrimitives
from hal_example_queue.runtime import at as at  # memory as the device's own threads see it

KEPT, BLOCKS = 1 << 28, 32
"""Bytes and blocks of freed memory that :func:`keeping` keeps: few blocks, so that it does not look like a leak."""


def queued():
    return QueueDevice(0, {})


def faulty():
    """With every fault over it but :class:`DelayedCopies`, which nothing arms."""
    device = queued()
    for fault in FAULTS:
        if fault is not DelayedCopies:
            lay(device, fault)
    return device


class KeepsFreed(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over the primitives: freed memory is released late.

    A liar's ticket is done while its work still runs, so its memory is freed under the work, and the process would
    end with SIGSEGV before a test's assertion.
    """

    def free(self, address):
        freed = self.__dict__.setdefault("freed", deque())
        freed.append(self.memory.pop(address))
        while len(freed) > BLOCKS or sum(block.nbytes for block in freed) > KEPT:
            freed.popleft()


def keeping():
    device = queued()
    lay_below(device, KeepsFreed)
    return device
