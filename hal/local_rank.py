"""Assignment of a host's devices to its ranks: one each, counted from the requested index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core import InvalidValue

if TYPE_CHECKING:
    from hal_core import Plugin

SHARED = "--share-devices"
AMONG = "HAL_RANKS_AMONG"
"""Variable with the numbers of a host's ranks if several launchers start them: how many come before this launcher's
first, a slash, and how many there are in all; or :data:`OWN_DEVICE`."""
OWN_DEVICE = "own"
"""Value of that variable if the rank's launcher hides all devices except the rank's own."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank's place on its host: its ``number`` among ``size``. ``share``: several may open one device."""

    number: int = 0
    size: int = 1
    share: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str], *, share: bool = False) -> LocalRank:
        """Read the launcher's list of endpoints; those of one host are equal up to the port. Raises
        :class:`InvalidValue` for another text in :data:`AMONG` than a launcher gives."""
        hosts = [one.rpartition(":")[0] for one in environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")]
        me = int(environment.get("PADDLE_TRAINER_ID", "0"))
        if me >= len(hosts):
            return cls(share=share)
        number, size = hosts[:me].count(hosts[me]), hosts.count(hosts[me])
        if environment.get(AMONG) == OWN_DEVICE:
            return cls(share=share)
        before, _, every = (text := environment.get(AMONG, f"0/{size}")).partition("/")
        if not (before.isdecimal() and every.isdecimal()):
            cure = f"give two numbers as 0/{size} (ranks before this launcher's, and all), or {OWN_DEVICE}, or unset it"
            raise InvalidValue(repr(text), cure=cure, argument=AMONG)
        return cls(int(before) + number, int(every), share)

    def index(self, plugin: type[Plugin], first: int) -> int:
        """Return the index that this rank opens if ``first`` was requested.

        Ranks take ``first`` and the following devices in order. A device that every process may open has ``first`` on
        all ranks.

        :raises InvalidValue: for more ranks than devices, unless they may ``share`` them.
        """
        if not (count := plugin.count()):
            return first
        if first + self.size > count and not self.share:
            raise InvalidValue(
                f"{self.size} rank(s) of this host need a device each, counted from {plugin.name}:{first}, and "
                f"there are {count}",
                cure=f"start fewer ranks, show them more devices, or let them open one together ({SHARED})",
                argument="--device",
            )
        return (first + self.number) % count


HOST_PLACE = "cpu"
"""Paddle's name of the host's memory."""


def moved(place: str, by: int) -> str:
    """Return the Paddle place (as "gpu:0") of the device so many places further; the host's memory is the same for
    every rank."""
    kind, _, number = place.partition(":")
    if not by or kind == HOST_PLACE:
        return place
    return f"{kind}:{int(number or 0) + by}"
