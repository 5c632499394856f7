"""What the conformance kit is told of the xpu device."""

from __future__ import annotations

from hal_conformance import GlooRanks
from hal_core import Support
from hal_core.devices import PaddleSupport, SimulatedRanks

from . import XpuPlugin


class OnCpu(GlooRanks, PaddleSupport):
    """Paddle's CPU place stands in, and gloo for BKCL."""


def support() -> Support:
    """Several ranks where something stands in for the chip; BKCL cannot be started without one."""
    place = XpuPlugin.substituted()
    if place == "cpu":
        return OnCpu()
    if place == "sim":
        from hal_sim.paddle_env import DEFAULT_NAME

        return SimulatedRanks("hal_sim", DEFAULT_NAME)
    return PaddleSupport()
