"""A runner for ``hal run``: as ``MixRunner``, but the second rank is killed once, in its sixth step."""

import os
import signal
from pathlib import Path

from hal_sim.mixing import MixRunner

STEP = 5


class MortalRunner(MixRunner):
    def __init__(self, setup):
        super().__init__(setup)
        self._mark, self._rank = Path(os.environ["MORTAL_MARK"]), setup.group.rank

    def launch(self, state, step, stream):
        if self._rank == 1 and step.step.number == STEP and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(state, step, stream)
