"""Assignment of a host's devices to its ranks: one each, counted from the requested index."""

from __future__ import annotations

import os
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
    """A rank's place on its host: its ``number`` among ``size``. ``share``: several may open one device. ``alone``: one
    launcher has started all of them, so it may have assigned devices."""

    number: int = 0
    size: int = 1
    share: bool = False
    alone: bool = True

    @classmethod
    def of(cls, environment: Mapping[str, str], *, share: bool = False) -> LocalRank:
        """Read the launcher's list of endpoints; those of one host are equal up to the port."""
        hosts = [one.rpartition(":")[0] for one in environment.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")]
        me = int(environment.get("PADDLE_TRAINER_ID", "0"))
        if me >= len(hosts):
            return cls(share=share)
        number, size = hosts[:me].count(hosts[me]), hosts.count(hosts[me])
        if environment.get(AMONG) == OWN_DEVICE:
            return cls(share=share)
        before, _, every = environment.get(AMONG, f"0/{size}").partition("/")
        return cls(int(before) + number, int(every), share, int(every) == size)

    def index(self, plugin: type[Plugin], first: int) -> int:
        """Return the index that this rank opens if ``first`` was requested.

        Ranks take ``first`` and the following devices in order. If ``first`` is 0, a device that Paddle's launcher has
        assigned to this rank (``--devices``) takes precedence. A device that every process may open has ``first`` on
        all ranks.

        :raises InvalidValue: for more ranks than devices, unless they may ``share`` them.
        """
        if not (count := plugin.count()):
            return first
        assigned = os.environ.get(f"FLAGS_selected_{plugin.kind}s", "") if plugin.kind else ""
        if self.alone and not first and assigned.isdigit() and int(assigned) < count:
            return int(assigned)
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
