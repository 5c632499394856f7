"""Paddle's launcher as hal starts it: its ranks are given no devices, nothing of the environment goes before its
arguments, and nothing of it is written to files.

By itself it gives each rank one of the devices that it sees (``FLAGS_selected_…``), and ends with an IndexError where
they are fewer than the ranks: also where ranks are on the host, or are to share one. What CUDA_VISIBLE_DEVICES names
counts as devices even if Paddle is built without CUDA. And of several GPUs Paddle then knows the given one alone, while
:mod:`hal.sharing` may say another. So it sees none, and hal's own rule is the one that counts, with its words.

And where variables as PADDLE_NNODES or PADDLE_LOG_DIR are set, as on a cluster for another job, it would go by those.

It also writes every variable of a rank's environment to files beside its log, readable by anybody who can enter the
folder. The environment may hold secrets, and a launcher that is killed leaves the files behind.
"""

from __future__ import annotations

import json
import os
import runpy
from types import SimpleNamespace
from typing import TextIO


def without_devices() -> None:
    """Have Paddle's launcher, in this process, see a host without devices."""
    from paddle.distributed.launch.context.device import Device, DeviceType

    Device.parse_device = staticmethod(lambda: Device(DeviceType.CPU))


def by_its_arguments() -> None:
    """Have Paddle's launcher, in this process, go by its arguments alone."""
    from paddle.distributed.launch.context.args_envs import env_args_mapping

    for name in env_args_mapping:
        os.environ.pop(name, None)


def without_environment_in_files() -> None:
    """Have Paddle's launcher, in this process, write and print no environment.

    Ranks read one of its files for variables that are too long for an environment: that keeps those alone.
    """
    from paddle.distributed.launch.controllers.controller import Controller
    from paddle.distributed.launch.utils import process_context

    long = getattr(process_context, "LIMIT_LEN_ENVS", ())

    def dump(variables: dict[str, str], file: TextIO, **_: object) -> None:
        json.dump({name: variables[name] for name in long if name in variables}, file)

    process_context.json = SimpleNamespace(dump=dump)
    Controller.save_pod_env = lambda self: None
    Controller.save_pod_log = lambda self, info: None
    os.environ.pop("FLAGS_print_launcher_env", None)


def main() -> None:
    """Be the launcher, with the arguments of this process."""
    without_devices()
    by_its_arguments()
    without_environment_in_files()
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
