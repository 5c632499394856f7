"""Number of ranks, and their launcher."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from hal_core import InvalidValue

LAUNCHERS = ("paddle", "ray")
STRATEGIES = ("strict-pack", "pack", "spread", "strict-spread")
"""Ray's placement strategies."""


class Ranks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Number of ranks and their launcher, as the options of ``hal run`` of these names.

    ``split``: numbers of prefill and decode workers, each of ``tp`` ranks; None: every worker does both. Raises
    :class:`InvalidValue`, which names the field, for combinations that are not possible.
    """

    tp: int = 1
    dp: int = 1
    split: tuple[int, int] | None = None
    dp_sync: bool = False
    restart: int = 0
    share_devices: bool = False
    launcher: Literal["paddle", "ray"] = "paddle"
    ray_address: str | None = None
    ray_placement: str = "strict-pack"

    def __post_init__(self) -> None:
        for name, least in (("tp", 1), ("dp", 1), ("restart", 0)):
            if (given := getattr(self, name)) < least:
                raise InvalidValue(f"{given}", cure=f"give a whole number of at least {least}", argument=name)
        if self.split is not None and min(self.split) < 1:
            cure = "give the number of workers of each role, at least 1"
            raise InvalidValue(f"{self.split}", cure=cure, argument="split")
        if self.split is not None and self.dp > 1:
            cure = "leave it out: a split has the number of workers of each role"
            raise InvalidValue(f"{self.dp} groups of ranks beside a split", cure=cure, argument="dp")
        for name, known in (("launcher", LAUNCHERS), ("ray_placement", STRATEGIES)):
            if (given := getattr(self, name)) not in known:
                raise InvalidValue(f"{given!r}", cure=f"give {' or '.join(known)}", argument=name)
        if self.launcher == "ray":
            if self.share_devices:
                cure = "leave it out: Ray starts the ranks and assigns their devices"
                raise InvalidValue('it does not go with launcher="ray"', cure=cure, argument="share_devices")
            return
        for name, asked in (
            ("ray_address", self.ray_address is not None),
            ("ray_placement", self.ray_placement != "strict-pack"),
        ):
            if asked:
                raise InvalidValue('needs launcher="ray"', cure="leave it out, or give that too", argument=name)

    @property
    def size(self) -> int:
        """Ranks of one worker, or of all groups together."""
        return self.tp * self.dp

    @property
    def workers(self) -> int:
        """Number of workers."""
        return 1 if self.split is None else sum(self.split)

    def fields(self) -> dict[str, Any]:
        """Return the fields that a rank's ``Setup`` has too."""
        return {name: getattr(self, name) for name in ("tp", "dp", "dp_sync", "share_devices")}
