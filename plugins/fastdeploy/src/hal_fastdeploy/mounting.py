"""The entry point ``hal`` of ``fastdeploy.model_runner_plugins``: FastDeploy's GPU or XPU runner with hal's insertion.

FastDeploy calls it without arguments and takes the class that it returns. After any error FastDeploy uses its own
runner. Only ``FD_PLUGINS=hal`` loads it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files
from typing import Any

from hal_core import HalError, Unavailable

from .insertion import Insertion
from .runners import GpuRunner, XpuRunner

log = logging.getLogger("hal")
UNTESTED = "HAL_FASTDEPLOY_UNTESTED"
FUNCTIONS = ("insert_tasks_v1",)
"""Functions of the runner that hal replaces."""


def model_runner() -> type[Any]:
    """Return a subclass of FastDeploy's GPU or XPU model runner, whichever the platform has.

    :raises Unavailable: for another platform, and for functions that were not compared with hal's.
    """
    try:
        kind = _kind()
        runner = _compared_runner(kind)
    except HalError as error:
        log.error("FastDeploy keeps its own model runner: %s", error)
        raise

    class HalModelRunner(runner):  # type: ignore[misc, valid-type]  # FastDeploy's, known only now
        """FastDeploy's runner, with tasks inserted by hal."""

        _hal_insertion: Insertion | None = None

        def insert_tasks_v1(self, req_dicts: Sequence[Any], num_running_requests: int) -> None:
            """Insert the tasks through hal; the tensors are resolved at the first call."""
            if self._hal_insertion is None:
                import hal

                device = hal.open_device(kind.device, index=int(self.device_id))
                self._hal_insertion = Insertion(device, self, super().insert_tasks_v1, kind=kind)
            self._hal_insertion(req_dicts, num_running_requests)

    return HalModelRunner


def digest_of(runner: type[Any]) -> dict[str, str]:
    """Return the SHA-256 of each replaced function's source, by its name."""
    return {name: hashlib.sha256(inspect.getsource(getattr(runner, name)).encode()).hexdigest() for name in FUNCTIONS}


def _kind() -> type[GpuRunner] | type[XpuRunner]:
    """Return the platform's kind of runner."""
    platform = import_module("fastdeploy.platforms").current_platform
    if platform.is_cuda():
        return GpuRunner
    if platform.is_xpu():
        return XpuRunner
    raise Unavailable(
        "hal's insertion follows FastDeploy's GPU and XPU runners, and this is another platform",
        cure="unset FD_PLUGINS, or call hal_fastdeploy.Insertion from a runner of your own (docs/fastdeploy.md)",
        argument="FD_PLUGINS",
    )


def _compared_runner(kind: type[GpuRunner] | type[XpuRunner]) -> type[Any]:
    """Return FastDeploy's runner, if its functions are among those that were compared."""
    runner: type[Any] = getattr(import_module(kind.module), kind.class_name)
    found = digest_of(runner)
    compared = json.loads(files("hal_fastdeploy").joinpath("compared.json").read_text(encoding="utf-8"))
    if found not in compared.values():
        if os.environ.get(UNTESTED) != "1":
            raise Unavailable(
                f"this FastDeploy's {', '.join(FUNCTIONS)} was not compared with hal's",
                cure=f"set {UNTESTED}=1 to use hal's without a comparison, or unset FD_PLUGINS",
                argument="FD_PLUGINS",
            )
        log.warning("%s=1: hal inserts the tasks of a FastDeploy that was not compared", UNTESTED)
    return runner
