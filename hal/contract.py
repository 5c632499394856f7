"""Check that a plugin was made for the installed contract version, before its code is imported.

The contract version is major.minor of the installed paddle-hal-core. A plugin states its range as the ordinary
requirement ``Requires-Dist: paddle-hal-core>=X.Y,<X+1``. pip then refuses most mismatches, this module the rest
(``--no-deps``, a core that was updated alone, editable installs).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from hal_core import PluginError

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version


_LOWER = frozenset({">=", ">", "==", "===", "~="})
_UPPER = frozenset({"<", "<=", "==", "===", "~="})
"""Operators that bound a range from below and from above."""
CORE = "paddle-hal-core"
"""The embedded core: its own device needs neither a contract range nor an entry in the allow-list."""


def normalized(name: str) -> str:
    """Return a distribution's name in the normal form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a plugin's contract range: the range as text, and its problem with the cure, or ""."""

    range: str
    problem: str = ""
    cure: str = ""


def contract_version() -> str:
    """Return major.minor of the installed paddle-hal-core."""
    version = _core_version()
    return f"{version.major}.{version.minor}"


def _core_version() -> Version:
    from packaging.version import InvalidVersion, Version

    try:
        text = metadata.version(CORE)
        return Version(text)
    except metadata.PackageNotFoundError:
        cure = "it comes with hal: pip install ./core in hal's checkout"
        raise PluginError(f"{CORE} is not installed", cure=cure) from None
    except (InvalidVersion, TypeError):
        raise PluginError(f"the metadata of {CORE} has no valid version", cure=f"reinstall {CORE}") from None


def verdict(distribution: str, requires: tuple[str, ...]) -> Verdict:
    """Check the range of the core's versions in a plugin's requirements."""
    version = _core_version()
    contract = f"{version.major}.{version.minor}"
    state = f"its metadata must say Requires-Dist: {CORE}>={contract},<{version.major + 1}; then reinstall it"
    try:
        stated = _range(requires)
    except ValueError as error:
        return Verdict("?", str(error), state)
    operators = {specifier.operator for specifier in stated or ()}
    if stated is None or not operators:
        return Verdict("none", f"it names no contract range (contract {contract} is installed)", state)
    text = ",".join(sorted(map(str, stated), key=lambda part: (part.startswith("<"), part)))
    if not (operators & _LOWER and operators & _UPPER):
        bound = "upper" if operators & _LOWER else "lower"
        return Verdict(text, f"its contract range {CORE}{text} has no {bound} bound", state)
    # By the base release, so that a development build of X.Y counts as X.Y, and patch-level bounds work too.
    if not stated.contains(version.base_version, prereleases=True):
        return Verdict(
            text,
            f"it is made for contract {text}, installed is {contract} ({CORE} {version})",
            f"install a {distribution} made for contract {contract}, or a {CORE} in {text}",
        )
    return Verdict(text)


def _range(requires: tuple[str, ...]) -> SpecifierSet | None:
    """Return all requirements on the core that apply here, combined; None without one."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet

    found: SpecifierSet | None = None
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            if normalized(line).startswith(CORE):
                raise ValueError(f"its requirement {line!r} cannot be parsed") from None
            continue  # another dependency's line, which only pip uses
        if normalized(requirement.name) != CORE:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found = (found or SpecifierSet()) & requirement.specifier
    return found
