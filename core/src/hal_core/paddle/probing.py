"""What Paddle is installed and which devices it was built for, read from its files: ``probe()`` may import nothing."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NO_PADDLE = "paddle is not installed"


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed Paddle: its folder, version, and what it says that it was built with."""

    folder: Path
    version: str
    xpu: bool
    cuda: bool

    @property
    def build(self) -> str:
        """What it was built for, in a word."""
        return "XPU" if self.xpu else "CUDA" if self.cuda else "the CPU"


def installed() -> Installed | None:
    """The installed Paddle, or None."""
    spec = find_spec("paddle")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (folder / "version" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    said = dict(re.findall(r"^(\w+)\s*=\s*'([^']*)'", text, re.MULTILINE))
    nothing = ("", "False", "None", "0")
    return Installed(
        folder,
        said.get("full_version", "unknown"),
        said.get("xpu_xre_version", "") not in nothing,
        said.get("cuda_version", "") not in nothing,
    )


def custom_device_libraries(paddle: Installed) -> list[str]:
    """File names of the CustomDevice plugins that Paddle will load, from the two places where it looks."""
    folders = [paddle.folder.parent / "paddle_custom_device"]
    named = os.environ.get("CUSTOM_DEVICE_ROOT")
    if named:
        folders = [Path(named)]
    return sorted(path.name for folder in folders if folder.is_dir() for path in folder.glob("*.so"))
