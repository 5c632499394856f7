"""Support of the xpu device for the conformance kit."""

from __future__ import annotations

from hal_conformance import JobRanks
from hal_core import Support
from hal_paddle.conformance import PaddleSupport, SimulatedRanks

from . import XpuPlugin


class OnCpu(JobRanks, PaddleSupport):
    """Support for Paddle's CPU place as the substitute, with hal's own collectives in place of BKCL."""


def support() -> Support:
    """Return the support; several ranks only with a substitute, as BKCL cannot start without a chip."""
    place = XpuPlugin.substituted()
    if place == "cpu":
        return OnCpu()
    if place == "sim":
        from hal_sim.paddle_env import DEFAULT_NAME

        return SimulatedRanks("hal_sim", DEFAULT_NAME)
    return PaddleSupport()
