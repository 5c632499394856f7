"""Blocks of a latched device's memory, with writes, reads and a switch that lets queued work run."""

import numpy as np
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import View
from latched import at

RING = {"ring_start": 4096, "ring_limit": 8192, "deadline": 0.01}
SIZE = 3000
"""Size of a block in bytes: two blocks fill the ring."""
INT64 = dtype_of("int64")


def bytes_of(memory):
    return at(memory.address, memory.nbytes)


def drain(device):
    for line in device.primitives.lines:
        device.primitives.run(line)


def numbers(memory):
    return View.contiguous(memory, 0, (memory.nbytes // 8,), INT64)


def write(device, memory, value, stream=None):
    target = numbers(memory)
    return device.submit_value(target, np.full(target.shape, value), stream or device.default_stream)


def stored_numbers(memory):
    return bytes_of(memory)[: memory.nbytes // 8 * 8].view(np.int64)
