"""Paddle's launcher as hal runs it: it assigns no devices, takes no options from the environment, and writes no
environment to files.

On its own the launcher gives each rank one of the devices that it sees (``FLAGS_selected_…``) and fails with an
IndexError if there are fewer devices than ranks, even for ranks on the host or ranks that share a device. Entries of
CUDA_VISIBLE_DEVICES count as devices even if Paddle is built without CUDA. Paddle then sees only the assigned GPU,
while :mod:`hal.local_rank` may choose another. So the launcher sees no devices, and hal's own rule decides, with hal's
errors.

The launcher would also read variables such as PADDLE_NNODES or PADDLE_LOG_DIR, which a cluster may have set for another
job.

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
    """Make Paddle's launcher in this process see a host without devices."""
    from paddle.distributed.launch.context.device import Device, DeviceType

    Device.parse_device = staticmethod(lambda: Device(DeviceType.CPU))


def by_its_arguments() -> None:
    """Make Paddle's launcher in this process use its arguments alone."""
    from paddle.distributed.launch.context.args_envs import env_args_mapping

    for name in env_args_mapping:
        os.environ.pop(name, None)


def without_environment_in_files() -> None:
    """Make Paddle's launcher in this process neither write nor print the environment.

    Ranks read one of its files for variables that are too long for an environment. That file keeps only those.
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
    """Run the launcher with the arguments of this process."""
    without_devices()
    by_its_arguments()
    without_environment_in_files()
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
