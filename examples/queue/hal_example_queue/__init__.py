"""An example: an asynchronous device of hal. Listing devices imports this module, so it stays light."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hal_core import Plugin, Probe

if TYPE_CHECKING:
    from .device import QueueDevice


class QueuePlugin(Plugin):
    """The entry point ``queue`` of group ``hal.devices``."""

    name = "queue"

    @classmethod
    def probe(cls) -> Probe:
        """Probe the driver, with the standard library alone."""
        return Probe.yes("worker threads")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> "QueueDevice":
        """Import the heavy modules, and open the device."""
        from .device import QueueDevice

        return QueueDevice(index, options)
