"""Build hook that compiles the native part into wheels and editable installs.

If it cannot be compiled, one line gives the reason, and the device runs as its fallback.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativePart(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles ``src/hal_cuda/native`` by ``src/hal_cuda/building.py``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """For an editable install beside the sources, else into the wheel, whose tag then names the platform."""
        package = Path(self.root) / "src" / "hal_cuda"
        spec = importlib.util.spec_from_file_location("hal_cuda_building", package / "building.py")
        assert spec is not None
        assert spec.loader is not None
        building = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(building)
        self._folder = tempfile.TemporaryDirectory()
        target = package if version == "editable" else Path(self._folder.name)
        try:
            made = building.build(target)
        except building.NotBuilt as error:
            if version == "editable":
                (package / building.NAME).unlink(missing_ok=True)
            print(f"hal: the native part of the cuda device was not built: {error}", file=sys.stderr)
            return
        if version != "editable":
            build_data["force_include"][str(made)] = f"hal_cuda/{building.NAME}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"cp311-abi3-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel has the file."""
        self._folder.cleanup()
