"""Build hook: the engine's wheel has the Paddle runner in it, which lies beside torch's in ``runners``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "hal_paddle_runner"


class PaddleRunner(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the package of a clone to a wheel and to an sdist. An sdist has it in ``src``, and an editable install has
    its folder on the path (``dev-mode-dirs``)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See ``BuildHookInterface``."""
        folder = Path(self.root).parent / "runners" / "paddle" / "src" / PACKAGE
        if version != "editable" and folder.is_dir():
            build_data["force_include"][str(folder)] = f"src/{PACKAGE}" if self.target_name == "sdist" else PACKAGE
