"""The rows of the matrix: every way of running the main job that must give the tokens of the plain run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

from tests.distributed.rows import AMPLE, SCARCE
from tests.distributed.rows import Row as OfRanks

CHUNK, WHOLE = 3, 256
"""Prompt tokens that a step feeds at most."""
AXES = {
    "tp": (1, 2),
    "dp": (1, 2),
    "speculate": ("none", "naive", "ngram", "suffix", "mtp", "hybrid"),
    "chunk": (WHOLE, CHUNK),
    "blocks": (AMPLE, SCARCE),
    "device": ("cpu", "sim", "xpu", "maca"),
    "split": ("off", "1,1", "2,1", "1,2"),
}
SUBSTITUTES = {"HAL_XPU_PLACE": "cpu", "HAL_MACA_PLACE": "sim"}
"""What stands in for the chips, in every process of the matrix."""
IN_MAKE_TEST = 15


@dataclass(frozen=True)
class Row(OfRanks):
    """One way; the rest of ``Setup`` is as the command has it."""

    timeout: float = 30.0
    split: str = "off"

    @property
    def name(self) -> str:
        """As it is told and chosen by."""
        chunk, blocks = "whole" if self.chunk == WHOLE else "chunks", "ample" if self.blocks == AMPLE else "scarce"
        cut = f"dp {self.dp}" if self.split == "off" else f"split {self.split}"
        return f"tp {self.tp}, {cut}, {self.speculate}, {chunk}, {blocks}, {self.device}"

    @property
    def ranks(self) -> int:
        """Processes of one job of Paddle's: of all groups, or of each worker of a split."""
        return self.tp * self.dp

    @property
    def workers(self) -> tuple[int, int]:
        """Of a split: how many prefill and how many decode."""
        prefill, decode = self.split.split(",")
        return int(prefill), int(decode)


def all_rows() -> list[Row]:
    """Every combination that there is (workers of a split are no groups of ``--dp``), those of one world of ranks one
    after the other."""
    found = [Row(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values())]
    found = [row for row in found if row.split == "off" or row.dp == 1]
    return sorted(found, key=lambda row: (row.ranks, row.device == "maca"))


def pairs_of(row: Row) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of values of two axes that a row shows."""
    return set(combinations([(axis, getattr(row, axis)) for axis in AXES], 2))


def pairwise(left: list[Row] | None = None, most: int = 960) -> list[Row]:
    """Rows (of ``left``) that show every pair of values, each chosen for most new pairs; at most so many."""
    left, chosen = left or all_rows(), list[Row]()
    missing = set[tuple[tuple[str, object], ...]]().union(*map(pairs_of, left))
    while missing and len(chosen) < most:
        best = max(left, key=lambda row: (len(pairs_of(row) & missing), -row.ranks))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def in_make_test() -> list[Row]:
    """Few rows that show most pairs, by their worlds: a world of ranks costs seconds, and maca's are worlds apart."""
    few = [row for row in all_rows() if row.device != "maca" or (row.ranks == 2 and row.split == "off")]
    return sorted(pairwise(few, IN_MAKE_TEST), key=lambda row: (row.ranks, row.device == "maca"))
