"""A plugin whose chip a substitute replaces, which a variable declares. Imports the standard library alone."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from ..contract.device import Plugin, Probe
from ..errors import Unavailable

if TYPE_CHECKING:
    from ..contract.device import Device


class SubstitutablePlugin(Plugin):
    """Base of plugin classes that run the same code without the chip, where ``HAL_<NAME>_PLACE`` names a substitute.

    The device then always reports that it is substituted. Such a device is selected only by name, as metadata cannot
    reflect a substitution. ``stand_ins``: the substitutes by the word that declares them.
    """

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
    def unknown_substitute(cls) -> Probe | None:
        """Return the refusal of a substitute that is not known, or None."""
        substitute = cls.substituted()
        if not substitute or substitute in cls.stand_ins:
            return None
        what = f"{cls.variable()}={substitute} is not a known substitute"
        return Probe.no(what, f"set it to {' or '.join(cls.stand_ins)}, or unset it")

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
