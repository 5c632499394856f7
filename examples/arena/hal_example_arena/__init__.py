"""An example: a device of hal without Paddle. Listing devices imports this module, so it stays light."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hal_core import Plugin, Probe

if TYPE_CHECKING:
    from .device import ArenaDevice


class ArenaPlugin(Plugin):
    """The entry point ``arena`` of group ``hal.devices``."""

    name = "arena"

    @classmethod
    def probe(cls) -> Probe:
        """Probe the driver, with the standard library alone; return the reason and the cure if it is missing."""
        return Probe.yes("anonymous memory")

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> "ArenaDevice":
        """Import the heavy modules, and open the device."""
        from .device import ArenaDevice

        return ArenaDevice(index, options)
