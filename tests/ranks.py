"""Ranks that are forks of one process with common imports done: each saves two seconds of processor time.

For the CPU's ranks: a device that Paddle takes at its import, by a variable, needs processes of its own.
"""

import atexit
import functools

from hal_conformance.ranks.processes import RankPool

from tests.warm import Warm

LIBRARIES = ("numpy", "safetensors.numpy", "tokenizers", "msgspec")
RANK = "import sys; from hal_conformance.ranks.processes import main; main(sys.argv[1:])"


@functools.cache
def warm():
    """The process that the ranks are forks of; it ends with this one."""
    made = Warm(LIBRARIES)
    atexit.register(made.close)
    return made


class ForkedRanks(RankPool):
    """A pool whose ranks are forks. The pipe of each is its standard input."""

    def _process(self, rank, link, environment):
        streams = {"stdin": link.fileno(), "stdout": self._logs[rank], "stderr": self._logs[rank]}
        return warm().start("0", str(rank), str(self.size), code=RANK, env=environment, **streams)
