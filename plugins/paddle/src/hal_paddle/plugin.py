"""The plugin class of devices that use Paddle: its probe, and the substitutes for the chip.

Its module imports the standard library alone, as a plugin class must.
"""

from __future__ import annotations

from abc import abstractmethod
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from hal_core import Probe
from hal_core.devices import Installed, SubstitutablePlugin, installed_paddle

if TYPE_CHECKING:
    pass


class PaddlePlugin(SubstitutablePlugin):
    """Base of plugin classes for devices that use Paddle.

    ``cure``: the packages to install. ``kind``: Paddle's device type. ``collective``: for a CustomDevice, the library's
    name, or "". ``stand_ins``: for each substitute the module of a simulated accelerator, or "" if Paddle alone
    suffices.
    """

    cure: ClassVar[str]
    kind: ClassVar[str] = ""
    collective: ClassVar[str]

    @classmethod
    def count(cls) -> int:
        """Return the number of chips in Paddle; each process has its own substitute."""
        return 0 if cls.substituted() else cls.chips()

    @classmethod
    @abstractmethod
    def chips(cls) -> int:
        """Return the number of this host's chips in Paddle."""

    @classmethod
    def probe(cls) -> Probe:
        """Look for Paddle and for a build that may support the chip, in files; ``open`` looks for the chip."""
        if (refusal := cls.unknown_substitute()) is not None:
            return refusal
        substitute = cls.substituted()
        paddle = installed_paddle()
        if paddle is None:
            return Probe.no("paddle is not installed", cls.cure)
        if not substitute:
            return cls.probe_build(paddle)
        module = cls.stand_ins[substitute]
        if module and find_spec(module) is None:
            return Probe.no(
                f"the substitute {module} is not installed",
                f"pip install ./plugins/{module.removeprefix('hal_')} in hal's checkout",
            )
        return Probe.yes(f"substituted: {substitute}, no chip is used")

    @classmethod
    @abstractmethod
    def probe_build(cls, paddle: Installed) -> Probe:
        """Return whether this build of Paddle may support the chip."""
