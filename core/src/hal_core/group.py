"""The tensor-parallel group of a hook call."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Group:
    """One tensor-parallel group: ``ranks`` are its global ranks in order, ``rank`` is the caller's own global rank.

    The source of every broadcast, and the only sender of output, is the group's first global rank (G13, G17).
    A group of one needs no process group and communicates nothing (G15).
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) != len(self.ranks):
            raise InvalidValue(
                f"ranks {self.ranks} must be distinct global ranks, none negative, at least one", argument="group"
            )
        if self.rank not in self.ranks:
            raise InvalidValue(
                f"rank {self.rank} is not in the group {self.ranks}",
                cure="give the caller's global rank and a group that contains it",
                argument="group",
            )

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def source(self) -> int:
        """The group's first global rank, the source of its broadcasts."""
        return self.ranks[0]

    @property
    def is_first(self) -> bool:
        """True on the group's first rank, which is the source of broadcasts and the only sender of output."""
        return self.rank == self.ranks[0]


ALONE = Group()
"""The group of a worker with one rank."""
