"""The plugin class of devices that use Paddle: its probe, and the substitutes for the chip.

Its module imports the standard library alone, as a plugin class must.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from hal_core import Plugin, Probe, Unavailable
from hal_core.devices import Installed, installed_paddle

if TYPE_CHECKING:
    from hal_core import Device


class PaddlePlugin(Plugin):
    """Base of plugin classes for devices that use Paddle. Selected only by name, as metadata cannot reflect a
    substitution.

    ``cure``: the packages to install. ``kind``: Paddle's device type. ``collective``: for a CustomDevice, the library's
    name, or "". ``stand_ins``: substitutes for the chip, by the word that declares them in ``HAL_<NAME>_PLACE``: the
    module of a simulated accelerator, or "" if Paddle alone suffices. The device then always reports that it is
    substituted.
    """

    cure: ClassVar[str]
    kind: ClassVar[str] = ""
    collective: ClassVar[str]
    stand_ins: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def variable(cls) -> str:
        """Return the environment variable that declares a substitution."""
        return f"HAL_{cls.name.upper().replace('-', '_')}_PLACE"

    @classmethod
    def substituted(cls) -> str:
        """Return the word of the substitute, or ""."""
        return os.environ.get(cls.variable(), "") if cls.stand_ins else ""

    @classmethod
    def shown(cls) -> str:
        """Return the name under which the device appears."""
        substitute = cls.substituted()
        return f"{cls.name} (substituted: {substitute})" if substitute else cls.name

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
        substitute = cls.substituted()
        if substitute and substitute not in cls.stand_ins:
            known = " or ".join(cls.stand_ins)
            return Probe.no(
                f"{cls.variable()}={substitute} is not a known substitute", f"set it to {known}, or unset it"
            )
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

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        """Open device ``index``. Options: ``ring_start``, ``ring_limit`` (bytes), ``deadline`` (seconds).

        :raises Unavailable: with the probe's reason and cure, if the device cannot be used here.
        """
        found = cls.probe()
        if not found.available:
            raise Unavailable(found.reason, cure=found.cure, device=cls.name)
        return cls.make(index, options)

    @classmethod
    @abstractmethod
    def make(cls, index: int, options: Mapping[str, object]) -> Device:
        """Return the device; heavy imports belong here."""
