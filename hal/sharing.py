"""Which of a host's devices each of its ranks opens: one each, from the index that was asked for on."""

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
"""The variable that tells ranks which of those on their host they are, where several launchers start some: how many
come before the first of these, a slash, and how many there are in all; or :data:`OWN_DEVICE`."""
OWN_DEVICE = "own"
"""Value of that variable for a rank whose launcher has hidden all devices but the rank's own."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank as one of those on its host: its ``number`` among ``size``. ``share``: several may open one device;
    ``alone``: its launcher has started all of them, and so may have given each a device."""

    number: int = 0
    size: int = 1
    share: bool = False
    alone: bool = True

    @classmethod
    def of(cls, environment: Mapping[str, str], *, share: bool = False) -> LocalRank:
        """As the launcher's list of endpoints says, those of one host being equal up to the port."""
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
        """The index that this rank opens, where ``first`` was asked for.

        That is ``first`` and on, in the order of the ranks. Where none but 0 was asked for, a device that Paddle's
        launcher has assigned to this rank (``--devices``) goes before. Of a device that every process may open,
        ``first`` on all ranks.

        :raises InvalidValue: for more ranks than devices, unless they may ``share`` them.
        """
        if not (count := plugin.count()):
            return first
        assigned = os.environ.get(f"FLAGS_selected_{plugin.kind}s", "") if plugin.kind else ""
        if self.alone and not first and assigned.isdigit() and int(assigned) < count:
            return int(assigned)
        if first + self.size > count and not self.share:
            raise InvalidValue(
                f"{self.size} rank(s) of this host are to have a device each from {plugin.name}:{first} on, and "
                f"there are {count}",
                cure=f"start fewer ranks, show them more devices, or let them open one together ({SHARED})",
                argument="--device",
            )
        return (first + self.number) % count


HOST_PLACE = "cpu"
"""What Paddle calls the host's memory."""


def moved(place: str, by: int) -> str:
    """A Paddle place (as "gpu:0") so many devices further on; the host's memory is every rank's."""
    kind, _, number = place.partition(":")
    if not by or kind == HOST_PLACE:
        return place
    return f"{kind}:{int(number or 0) + by}"
