"""The plugin class of devices that are reached through Paddle: what it looks for, and what may stand in for the chip.

Its module imports the standard library alone, as a plugin class must.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from ...contract.device import Plugin, Probe
from ...errors import Unavailable
from . import probing

if TYPE_CHECKING:
    from ...contract.device import Device


class PaddlePlugin(Plugin):
    """Derive from it. Selected by name only, as a line in the metadata cannot know of a substitution.

    ``cure``: what to install. ``kind``: Paddle's device type; ``collective``: of a CustomDevice, the library's name,
    "" where there is none. ``stand_ins``: what may stand in for the chip, by the word with which
    ``HAL_<NAME>_PLACE`` declares it: the module of a simulated accelerator, or "" where Paddle alone will do. The
    device then says everywhere that it is substituted.
    """

    cure: ClassVar[str]
    kind: ClassVar[str] = ""
    collective: ClassVar[str]
    stand_ins: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def variable(cls) -> str:
        """The environment variable that declares a substitution."""
        return f"HAL_{cls.name.upper().replace('-', '_')}_PLACE"

    @classmethod
    def substituted(cls) -> str:
        """The word for what stands in, or ""."""
        return os.environ.get(cls.variable(), "") if cls.stand_ins else ""

    @classmethod
    def shown(cls) -> str:
        """The name that the device gives itself."""
        substitute = cls.substituted()
        return f"{cls.name} (substituted: {substitute})" if substitute else cls.name

    @classmethod
    def count(cls) -> int:
        """The chips that Paddle sees; what stands in for one is each process's own."""
        return 0 if cls.substituted() else cls.chips()

    @classmethod
    @abstractmethod
    def chips(cls) -> int:
        """How many chips Paddle sees on this host."""

    @classmethod
    def probe(cls) -> Probe:
        """Look for Paddle and for a build that may know the chip, in files; the chip is looked for by ``open``."""
        substitute = cls.substituted()
        if substitute and substitute not in cls.stand_ins:
            known = " or ".join(cls.stand_ins)
            return Probe.no(f"{cls.variable()}={substitute} names no substitute", f"set it to {known}, or unset it")
        paddle = probing.installed_paddle()
        if paddle is None:
            return Probe.no(probing.NO_PADDLE, cls.cure)
        if not substitute:
            return cls.probe_build(paddle)
        module = cls.stand_ins[substitute]
        if module and find_spec(module) is None:
            return Probe.no(
                f"{module}, which stands in, is not installed",
                f"pip install ./plugins/{module.removeprefix('hal_')} in hal's checkout",
            )
        return Probe.yes(f"substituted: {substitute}, no chip is used")

    @classmethod
    @abstractmethod
    def probe_build(cls, paddle: probing.Installed) -> Probe:
        """Whether this build of Paddle may know the chip."""

    @classmethod
    def open(cls, index: int, options: Mapping[str, object]) -> Device:
        """Open device ``index``. Options: ``ring_start``, ``ring_limit`` (bytes), ``deadline`` (seconds).

        :raises Unavailable: with the probe's reason and cure, where it cannot be used here.
        """
        found = cls.probe()
        if not found.available:
            raise Unavailable(found.reason, cure=found.cure, device=cls.name)
        return cls.make(index, options)

    @classmethod
    @abstractmethod
    def make(cls, index: int, options: Mapping[str, object]) -> Device:
        """The device; heavy imports belong here."""
