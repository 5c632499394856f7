"""The command line that repeats a run in a fresh process, in any folder."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from ..kit import Kit

FLAGS = ("device-factory", "policy", "liar", "fault", "fields")
PATHS = ("device-factory", "policy", "fields", "liar")
"""Options that name ``module:attribute``, or may."""
OURS = "hal_conformance.plugin"


class Reproduction:
    """The options of a run. ``variables``: the environment before a plugin is opened, which may change it."""

    def __init__(self, config: pytest.Config) -> None:
        self._option: Callable[[str], Any] = config.getoption
        self._device = self._option("--hal-device") or config.getini("hal_device")
        self._variables = dict(os.environ)
        self._here = Path.cwd().resolve()
        self._known: tuple[str, ...] = ()

    def opened(self, name: str, substitute: str) -> None:
        """Take the name of the device, once it is open, and that of the place that stands in for it, or ""."""
        self._known = prefixes(filter(None, (name.partition(" ")[0], substitute)))

    def line(self, kit: Kit | None, only: str = "") -> str:
        """Return the command; ``only``: a guarantee's name, else the whole run."""
        plugins = [name for name in self._option("plugins") or () if name != OURS and not name.startswith("no:")]
        if plugins:  # hal conform takes no plugins of pytest
            loaded = " ".join(f"-p {name}" for name in (OURS, *plugins))
            parts = [f"python -m pytest {loaded} --pyargs hal_conformance", *self._options("--hal-", kit, only)]
        else:
            parts = [*self._command(), *self._options("--", kit, only)]
        return " ".join([*self._environment(), *parts])

    def _command(self) -> list[str]:
        command = "hal conform" if find_spec("hal") else "python -m hal_conformance"
        return [command, self._device] if self._device else [command]

    def _options(self, dashes: str, kit: Kit | None, only: str) -> Iterator[str]:
        chosen = {"device": self._device} if dashes != "--" and self._device else {}
        chosen |= {"only": only} | {flag: self._option(f"--hal-{flag}") for flag in FLAGS}
        if kit is not None:
            from ..kit import Effort

            effort = kit.effort
            chosen |= {"profile": effort.profile, "seed": str(effort.seed), "examples": str(effort.examples or "")}
            chosen["hang"] = "" if effort.hang == Effort.hang else f"{effort.hang:g}"
        yield from (f"{dashes}{name} {shlex.quote(value)}" for name, value in chosen.items() if value)

    def _environment(self) -> Iterator[str]:
        """Yield the variables that the run depends on, as a shell takes them."""
        if folders := self._folders():
            yield f"PYTHONPATH={shlex.quote(os.pathsep.join(folders))}"
        named = sorted(each for each in self._variables if self._known and each.startswith(self._known))
        yield from (f"{each}={shlex.quote(self._variables[each])}" for each in named)

    def _folders(self) -> list[str]:
        """Return the folders of modules that options name, where ``hal`` itself would not find them."""
        given = [Path(one).resolve() for one in self._variables.get("PYTHONPATH", "").split(os.pathsep) if one]
        for name in (self._option(f"--hal-{flag}").partition(":")[0] for flag in PATHS):
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is not None:
                path = Path(file).resolve()
                up = name.count(".") + (path.name == "__init__.py")
                if (folder := path.parents[up]) in {*given, self._here}:
                    return [str(one) for one in dict.fromkeys([folder, *given])]
        return []


def prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Return how variables begin that are named after a device or its substitute: HAL_XPU_PLACE, HALSIM_MODE."""
    return tuple(f"HAL{line}{name.upper()}_" for name in names for line in ("_", ""))
