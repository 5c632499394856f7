"""The sim device with several ranks, opened by ``--device-factory sim_ranks:sim``.

It is what ``hal_sim.conformance.SimSupport`` needs besides, until it has it itself.
"""

import os

from hal_sim.conformance import SimSupport
from hal_sim.plugin import SimPlugin


class SimRanks(SimSupport):
    """Groups over shared memory, which find each other by the name of the job."""

    ranks = True

    def rank_environment(self, rank, endpoints):
        return {"PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints)}

    def join(self, groups, timeout, epoch):
        from hal_sim.settings import set_option

        set_option("collective_timeout_ms", round(1000 * timeout))
        with open(f"/proc/{os.getppid()}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
        os.environ["HALSIM_JOB"] = f"{os.getppid()}_{started}_{epoch}"


def sim():
    return SimPlugin.open(0, {})


sim.support = SimRanks
