"""The kit in a separate process: for devices that a framework loads at its import, and so once per process.

    with KitProcess("mychip", "--hal-profile=quick", environment=os.environ | {"MYCHIP": "simulated"}) as run:
        report = run.report()

It starts at once, so that several can run concurrently.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class KitProcess:
    """One run of the kit on ``device``, with further ``arguments`` for pytest. A context manager, which ends it."""

    def __init__(
        self, device: str, *arguments: str, environment: Mapping[str, str] = os.environ, python: str = sys.executable
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._report = Path(self._folder.name) / "report.json"
        plugins = ["-p", "no:cacheprovider", "-p", "hal_conformance.plugin"]
        options = [f"--hal-device={device}", f"--hal-report={self._report}", *arguments]
        self._process = subprocess.Popen(
            [python, "-m", "pytest", "-q", *plugins, "--pyargs", "hal_conformance", *options],
            env=dict(environment),
            cwd=self._folder.name,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def report(self, timeout: float = 600.0) -> dict[str, Any]:
        """Wait for the end and return the report as data. Raises with the run's output if a test failed."""
        output, _ = self._process.communicate(timeout=timeout)
        if self._process.returncode:
            raise AssertionError(f"the kit ended with {self._process.returncode}:\n{output[-4000:]}")
        found: dict[str, Any] = json.loads(self._report.read_text(encoding="utf-8"))
        return found

    def close(self) -> None:
        """End the process if it is still running."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> KitProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
