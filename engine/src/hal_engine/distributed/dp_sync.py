"""``--dp-sync``: data-parallel ranks meet in a collective at each run of layers, as expert parallelism needs it.

A rank without tokens must meet the others all the same. So each step has a fixed number of collectives: one for the
model's forward and, if the checkpoint's own layer drafts, one for each possible draft. A rank that ran fewer adds empty
ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hal_core import HalError

if TYPE_CHECKING:
    from .tensor_ranks import TensorRanks


class DpSync:
    """The collectives of one rank with the ranks that hold the same part of the model in the other groups.

    ``runs``: collectives of a step.
    """

    def __init__(self, across: TensorRanks, runs: int) -> None:
        self._across, self._runs = across, runs
        self._met = 0

    def meet(self, tokens: int) -> int:
        """Meet before ``tokens`` tokens run. Return the tokens of all groups. Raises
        :class:`hal_core.errors.GroupLost`."""
        import paddle

        self._met += 1
        total = self._across.all_reduce(paddle.to_tensor(np.array([tokens], np.int64), place="cpu"))
        return int(total.numpy()[0])

    def fill(self) -> None:
        """End the step: add the collectives that other groups may have."""
        if self._met > self._runs:
            raise HalError(
                f"{self._met} runs of layers in a step of at most {self._runs}",
                cure="report it: the other groups wait for fewer",
            )
        while self._met < self._runs:
            self.meet(0)
        self._met = 0
