"""Layout of ranks: N consecutive tensor-parallel ranks make a group, and M groups serve requests in parallel.

Rank r is number ``r % tp`` of group ``r // tp``. All ranks open all groups in the order of :meth:`RankLayout.groups`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal_core import Group, InvalidValue


@dataclass(frozen=True, slots=True)
class RankLayout:
    """``tp`` ranks in each of ``dp`` groups."""

    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp"):
            if getattr(self, name) < 1:
                cure = "give a whole number of at least 1"
                raise InvalidValue(f"{getattr(self, name)}", cure=cure, argument=f"--{name}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    def members(self, number: int) -> tuple[int, ...]:
        """Return the global ranks of a group."""
        return tuple(range(number * self.tp, (number + 1) * self.tp))

    def number_of(self, rank: int) -> int:
        """Return a rank's group."""
        return rank // self.tp

    def group(self, rank: int) -> Group:
        """Return a rank's tensor-parallel group."""
        return Group(self.members(self.number_of(rank)), rank)

    def groups(self) -> list[tuple[int, ...]]:
        """Return every group of more than one rank, in the one order in which all ranks open them."""
        found = [self.members(number) for number in range(self.dp)]
        return [ranks for ranks in found if len(ranks) > 1]
