"""The conformance kit: property tests that check the contract of :mod:`hal_core.contract.hookspecs` on any device.

Run it with ``pytest --pyargs hal_conformance --hal-device=NAME``, ``hal conform NAME`` or ``python -m hal_conformance
NAME``; in a plugin's own tests, ``from hal_conformance.suite import *``. ``docs/conformance.md`` explains the report.

Names are loaded on first use, so that the kit does not slow down a pytest that does not use it.
"""

from typing import TYPE_CHECKING

from hal_core.lazy import face

if TYPE_CHECKING:
    from hal_core.contract.support import Support as Support

    from .harness.isolated import KitProcess as KitProcess
    from .ranks.processes import RankPool as RankPool
    from .ranks.processes import gloo as gloo
    from .ranks.processes import job_variables as job_variables
    from .ranks.support import GlooRanks as GlooRanks
    from .ranks.support import JobRanks as JobRanks
    from .report.command import main as main

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "hal_core.contract.support": "Support",
        "hal_conformance.harness.isolated": "KitProcess",
        "hal_conformance.ranks.support": "GlooRanks JobRanks",
        "hal_conformance.ranks.processes": "RankPool gloo job_variables",
        "hal_conformance.report.command": "main",
    },
)
