"""Paddle's launcher as hal starts it: its ranks are given no devices, and nothing of the environment goes before its
arguments.

By itself it gives each rank one of the devices that it sees (``FLAGS_selected_…``), and ends with an IndexError where
they are fewer than the ranks: also where ranks are on the host, or are to share one. What CUDA_VISIBLE_DEVICES names
counts as devices even if Paddle is built without CUDA. And of several GPUs Paddle then knows the given one alone, while
:mod:`hal.sharing` may say another. So it sees none, and hal's own rule is the one that counts, with its words.

And where variables as PADDLE_NNODES or PADDLE_LOG_DIR are set, as on a cluster for another job, it would go by those.
"""

from __future__ import annotations

import os
import runpy


def without_devices() -> None:
    """Have Paddle's launcher, in this process, see a host without devices."""
    from paddle.distributed.launch.context.device import Device, DeviceType

    Device.parse_device = staticmethod(lambda: Device(DeviceType.CPU))


def by_its_arguments() -> None:
    """Have Paddle's launcher, in this process, go by its arguments alone."""
    from paddle.distributed.launch.context.args_envs import env_args_mapping

    for name in env_args_mapping:
        os.environ.pop(name, None)


def main() -> None:
    """Be the launcher, with the arguments of this process."""
    without_devices()
    by_its_arguments()
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
