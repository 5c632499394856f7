"""The entry point ``hal`` of ``fastdeploy.model_runner_plugins``: FastDeploy's GPU runner with hal's insertion.

FastDeploy calls it without arguments, takes the class that it returns, and after any error goes on with its own runner.
Only ``FD_PLUGINS=hal`` loads it.
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

log = logging.getLogger("hal")
UNTESTED = "HAL_FASTDEPLOY_UNTESTED"
FUNCTIONS = ("insert_tasks_v1",)
"""Functions of the runner that hal's take the place of."""


def model_runner() -> type[Any]:
    """Return a subclass of FastDeploy's GPU model runner.

    :raises Unavailable: for a platform without one, and for functions that nobody has compared with hal's.
    """
    try:
        runner = _runner()
    except HalError as error:
        log.error("FastDeploy goes on with its own model runner: %s", error)
        raise

    class HalModelRunner(runner):  # type: ignore[misc, valid-type]  # FastDeploy's, known only now
        """FastDeploy's runner, whose tasks hal inserts."""

        _hal_insertion: Insertion | None = None

        def insert_tasks_v1(self, req_dicts: Sequence[Any], num_running_requests: int) -> None:
            """Insert the tasks through hal; the tensors are resolved at the first call."""
            if self._hal_insertion is None:
                import hal

                device = hal.open_device("cuda", index=int(self.device_id))
                self._hal_insertion = Insertion(device, self, super().insert_tasks_v1)
            self._hal_insertion(req_dicts, num_running_requests)

    return HalModelRunner


def digest_of(runner: type[Any]) -> dict[str, str]:
    """Function to SHA-256 of its source."""
    return {name: hashlib.sha256(inspect.getsource(getattr(runner, name)).encode()).hexdigest() for name in FUNCTIONS}


def _runner() -> type[Any]:
    """FastDeploy's GPU runner, after its functions were looked up among those that were compared."""
    platform = import_module("fastdeploy.platforms").current_platform
    if not platform.is_cuda():
        raise Unavailable(
            "hal's insertion follows FastDeploy's GPU runner, and this is another platform",
            cure="unset FD_PLUGINS, or call hal_fastdeploy.Insertion from a runner of your own (docs/fastdeploy.md)",
        )
    runner: type[Any] = import_module("fastdeploy.worker.gpu_model_runner").GPUModelRunner
    found = digest_of(runner)
    compared = json.loads(files("hal_fastdeploy").joinpath("compared.json").read_text(encoding="utf-8"))
    if found not in compared.values():
        if os.environ.get(UNTESTED) != "1":
            raise Unavailable(
                f"nobody has compared this FastDeploy's {', '.join(FUNCTIONS)} with hal's",
                cure=f"set {UNTESTED}=1 to use hal's all the same, or unset FD_PLUGINS",
                argument="FD_PLUGINS",
            )
        log.warning("%s=1: hal inserts the tasks of a FastDeploy that nobody has compared", UNTESTED)
    return runner
