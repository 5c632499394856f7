"""The installed Paddle and the devices it was built for, read from its files, as ``probe()`` may not import Paddle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NOTHING = ("", "0", "False", "None")
"""Versions that Paddle gives for a library it was built without."""


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed Paddle: its folder, its version, and the libraries that its version file names.

    ``parts`` holds X for each ``X_version`` with a version; a build for the CPU alone names none.
    """

    folder: Path
    version: str
    parts: frozenset[str] = frozenset()

    @property
    def build(self) -> str:
        """The targets of the build, in a word or two."""
        return ", ".join(sorted(self.parts)) or "the CPU"


def installed_paddle() -> Installed | None:
    """Return the installed Paddle, or None."""
    spec = find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (folder / "version" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    fields = dict(re.findall(r"^(\w+)_version\s*=\s*'([^']*)'", text, re.MULTILINE))
    version = fields.pop("full", "unknown")
    return Installed(folder, version, frozenset(name for name, value in fields.items() if value not in NOTHING))
