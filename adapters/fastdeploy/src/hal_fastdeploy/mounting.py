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

import hal
from hal import selection

from .host import method_of
from .insertion import Insertion
from .names import KNOWN, PROPOSED
from .runners import GpuRunner, XpuRunner

log = logging.getLogger("hal")
UNTESTED = "HAL_FASTDEPLOY_UNTESTED"
FUNCTION = "insert_tasks_v1"
"""The function of the runner, and of an MTP proposer, that hal replaces."""


def model_runner() -> type[Any]:
    """Return a subclass of FastDeploy's GPU or XPU model runner, whichever the platform has.

    :raises Unavailable: for another platform, without a driver, and for functions that do what hal's insertion does
        not, or that were not compared with it.
    """
    try:
        kind = _kind()
        selection.select(kind.device)  # is there a driver? Once the runner is made, FastDeploy has no other to use
        runner, proposer = _class(kind.module, kind.class_name), _class("fastdeploy.spec_decode.mtp", "MTPProposer")
        found = KNOWN[kind].check(getattr(runner, FUNCTION))
        PROPOSED.check(getattr(proposer, FUNCTION))
        _check_compared(runner, proposer)
    except HalError as error:
        log.error("FastDeploy keeps its own model runner: %s", error)
        raise

    class HalModelRunner(runner):  # type: ignore[misc, valid-type]  # FastDeploy's, known only now
        """FastDeploy's runner, with tasks inserted by hal."""

        _hal_insertion: Insertion | None = None

        def insert_tasks_v1(self, req_dicts: Sequence[Any], num_running_requests: int) -> None:
            """Insert the tasks through hal, on the chip of ``device``: ``device_id`` is its number on the host."""
            if self._hal_insertion is None:
                device = hal.open_device(kind.device, index=selection.requested(str(self.device)).index)
                names = PROPOSED.check(getattr(type(self.proposer), FUNCTION)) if method_of(self) == "mtp" else None
                own = super().insert_tasks_v1
                self._hal_insertion = Insertion(device, self, own, kind=kind, found=found, proposer_found=names)
            self._hal_insertion(req_dicts, num_running_requests)

    return HalModelRunner


def digest_of(*holders: type[Any]) -> dict[str, str]:
    """Return the SHA-256 of the source of each class's function that is replaced, by the class's name."""
    sources = {holder.__name__: inspect.getsource(getattr(holder, FUNCTION)).encode() for holder in holders}
    return {name: hashlib.sha256(source).hexdigest() for name, source in sources.items()}


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


def _class(module: str, name: str) -> type[Any]:
    try:
        found: type[Any] = getattr(import_module(module), name)
        getattr(found, FUNCTION)
    except (ImportError, AttributeError) as error:
        what = f"this FastDeploy's {name} cannot be read: {error}"
        raise Unavailable(what, cure="unset FD_PLUGINS", argument="FD_PLUGINS") from error
    return found


def _check_compared(runner: type[Any], proposer: type[Any]) -> None:
    """Check that the functions are among those that were compared with hal's, or that the user takes others."""
    compared = json.loads(files("hal_fastdeploy").joinpath("compared.json").read_text(encoding="utf-8"))
    if digest_of(runner, proposer) not in compared.values():
        if os.environ.get(UNTESTED) != "1":
            raise Unavailable(
                f"this FastDeploy's {FUNCTION} was not compared with hal's",
                cure=f"set {UNTESTED}=1 to use hal's without a comparison, or unset FD_PLUGINS",
                argument="FD_PLUGINS",
            )
        log.warning("%s=1: hal inserts the tasks of a FastDeploy that was not compared", UNTESTED)
