"""The asynchronous example device, which the kit's tests open by a factory: its streams can be held."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "queue"))

from hal_example_queue.device import QueueDevice
from hal_example_queue.runtime import at as at  # memory as the device's own threads see it


def queued():
    return QueueDevice(0, {})
