"""Paddle's launcher as hal starts it: its ranks are given no devices.

By itself it gives each rank one of the devices that it sees (``FLAGS_selected_…``), and ends with an IndexError where
they are fewer than the ranks: also where ranks are on the host, or are to share one. What CUDA_VISIBLE_DEVICES names
counts as devices even if Paddle is built without CUDA. And of several GPUs Paddle then knows the given one alone, while
:mod:`hal.sharing` may say another. So it sees none, and hal's own rule is the one that counts, with its words.
"""

from __future__ import annotations

import runpy


def without_devices() -> None:
    """Have Paddle's launcher, in this process, see a host without devices."""
    from paddle.distributed.launch.context.device import Device, DeviceType

    Device.parse_device = staticmethod(lambda: Device(DeviceType.CPU))


def main() -> None:
    """Be the launcher, with the arguments of this process."""
    without_devices()
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
