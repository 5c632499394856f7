"""The asynchronous example device, which the tests of the kit open by a factory: it has real streams, held at will."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "queue"))

from hal_example_queue.device import QueueDevice
from hal_example_queue.runtime import at as at  # memory as the device's own threads see it


def queued():
    return QueueDevice(0, {})
