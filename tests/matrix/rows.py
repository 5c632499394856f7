"""The rows of the matrix: every way of running the main job that must give the tokens of the plain run.

Steps of the Paddle model cannot overlap, as it samples on the host (docs/overlap.md). On a device where steps can, its
own runner, which needs no data on the host, runs the job besides, with overlap and without: its tokens are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product

from hal_core import SamplingParams
from msgspec import structs

from tests.distributed.rows import AMPLE, SCARCE, requests
from tests.distributed.rows import Row as OfRanks

CHUNK, WHOLE = 3, 256
"""Prompt tokens that a step feeds at most."""
AXES = {
    "tp": (1, 2),
    "dp": (1, 2),
    "speculate": ("none", "naive", "ngram", "suffix", "mtp", "hybrid", "own"),
    "chunk": (WHOLE, CHUNK),
    "blocks": (AMPLE, SCARCE),
    "device": ("cpu", "sim", "xpu", "maca", "opencl"),
    "split": ("off", "1,1", "2,1", "1,2"),
    "overlap": ("cannot", "on", "off"),
    "launcher": ("local", "ray"),
}
RUNNERS = {"sim": "hal_sim.mixing:MixRunner"}
"""Runners that do not need the host, by device; ``own`` drafts for itself, on the device."""
ON_RAY = ("cpu", "sim")
"""Devices that every process of a host may open. Ray assigns none of the rest here: xpu and maca name no resource of
Ray's."""
SUBSTITUTES = {"HAL_XPU_PLACE": "cpu", "HAL_MACA_PLACE": "sim"}
"""Stand-ins for the chips, in every process of the matrix."""
IN_MAKE_TEST, SPLITS = 11, 4
"""Rows of ``make test``, and how many of them have a split."""


@dataclass(frozen=True)
class Row(OfRanks):
    """One way; the rest of ``Setup`` has the command's defaults."""

    timeout: float = 30.0
    split: str = "off"
    overlap: str = "cannot"
    launcher: str = "local"

    @property
    def runner(self) -> str:
        """What makes the runner, "" for the Paddle model."""
        return RUNNERS[self.device] if self.overlap != "cannot" else ""

    @property
    def sizes(self):
        """Requests of the main job, without log-probabilities for such a runner."""
        return replace(super().sizes, max_logprobs=0) if self.runner else super().sizes

    def setup(self, **more):
        """The proposer or, if there is one, the runner that drafts for itself."""
        own = {"runner": self.runner, "speculate": "none"} if self.runner else {"overlap": "auto"}
        return super().setup(**own, **more)

    @property
    def requests(self):
        """The job's requests; those of such a runner are of the same prompts."""
        return mixing_requests() if self.runner else requests()

    @property
    def name(self) -> str:
        """Name of the row, in output and options."""
        chunk, blocks = "whole" if self.chunk == WHOLE else "chunks", "ample" if self.blocks == AMPLE else "scarce"
        cut = f"dp {self.dp}" if self.split == "off" else f"split {self.split}"
        steps = f", overlap {self.overlap}" if self.runner else ""
        on_ray = ", on Ray" if self.launcher == "ray" else ""
        return f"tp {self.tp}, {cut}, {self.speculate}, {chunk}, {blocks}, {self.device}{steps}{on_ray}"

    @property
    def ranks(self) -> int:
        """Processes of one Paddle job: of all groups, or of each worker of a split."""
        return self.tp * self.dp

    @property
    def workers(self) -> tuple[int, int]:
        """Of a split: how many prefill and how many decode."""
        prefill, decode = self.split.split(",")
        return int(prefill), int(decode)


@cache
def mixing_requests():
    """Requests without options for which a mixing runner has no distribution; each request has its own seed."""
    made = []
    for number, one in enumerate(requests()):
        params = SamplingParams(max_tokens=one.params.max_tokens, seed=number, eos_token_ids=one.params.eos_token_ids)
        made.append(structs.replace(one, params=params))
    return made


def there_is(row: Row) -> bool:
    """Whether hal has such a way: workers of a split are no groups of ``--dp``, ``--speculate`` is the model's, and
    only several ranks have a launcher."""
    if row.launcher == "ray" and (row.device not in ON_RAY or (row.ranks == 1 and row.split == "off")):
        return False
    if row.split != "off" and row.dp > 1:
        return False
    if row.device == "opencl" and row.ranks > 1:  # it has no collectives
        return False
    if row.overlap == "cannot":
        return row.speculate != "own"
    return row.device in RUNNERS and row.speculate in ("none", "own")


def all_rows() -> list[Row]:
    """All combinations on kept ranks, those of one world one after another. On Ray, which restarts ranks for each row,
    as many as show every pair of values."""
    found = [Row(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values())]
    found = [row for row in found if there_is(row)]
    kept = [row for row in found if row.launcher == "local"]
    on_ray = pairwise([row for row in found if row.launcher == "ray"])
    return sorted(kept, key=lambda row: (row.ranks, row.device == "maca")) + on_ray


def pairs_of(row: Row) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of values of two axes that a row shows."""
    return set(combinations([(axis, getattr(row, axis)) for axis in AXES], 2))


def pairwise(left: list[Row] | None = None, most: int = 9999) -> list[Row]:
    """Rows (of ``left``) that show every pair of values, each chosen for most new pairs; at most so many."""
    left, chosen = left or all_rows(), list[Row]()
    missing = set[tuple[tuple[str, object], ...]]().union(*map(pairs_of, left))
    while missing and len(chosen) < most:
        best = max(left, key=lambda row: (len(pairs_of(row) & missing), -row.ranks))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def in_make_test() -> list[Row]:
    """Few rows that show most pairs, by their worlds: a world of ranks costs seconds. Those of maca, which are worlds
    apart, are left to ``make conform``. Of splits those whose proposer's state moves too."""

    def small(row: Row) -> bool:
        ranks = row.ranks if row.split == "off" else row.ranks * sum(row.workers)
        return ranks <= 4 and row.device != "maca"

    few = [row for row in all_rows() if small(row) and row.launcher == "local"]
    splits = [row for row in few if row.split != "off" and (row.runner or row.speculate in ("mtp", "hybrid"))]
    chosen = pairwise([row for row in few if row.split == "off"], IN_MAKE_TEST - SPLITS) + pairwise(splits, SPLITS)
    return sorted(chosen, key=lambda row: (row.ranks, row.device == "maca"))
