"""Which cards a process is shown, across Paddle's launcher.

The launcher reads CUDA_VISIBLE_DEVICES as a list of the devices that its ranks are to have, one each, also where its
Paddle is built without CUDA: then ranks on the host end with an IndexError as soon as there are more of them than cards
are named. So it does not see what its Paddle cannot use, and its ranks get it back before they look for a device.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import MutableMapping

KEPT = "HAL_RANKS_SHOWN_"
"""What stands before the name of a variable that is kept from Paddle's launcher."""
CUDA, XPU = ("CUDA_VISIBLE_DEVICES",), ("XPU_VISIBLE_DEVICES", "XPULINK_VISIBLE_DEVICES")


def keep(environment: MutableMapping[str, str], *, cuda: bool, xpu: bool) -> None:
    """Put aside what names cards that a Paddle which is built for ``cuda``, for ``xpu`` or for neither cannot use.

    One for XPU reads CUDA's variable too where there is none of its own
    (``paddle/distributed/launch/context/device.py``).
    """
    for name in (() if cuda or xpu else CUDA) + (() if xpu else XPU):
        if name in environment:
            environment[KEPT + name] = environment.pop(name)


def give_back(environment: MutableMapping[str, str]) -> None:
    """Set again what was put aside."""
    for name in CUDA + XPU:
        if KEPT + name in environment:
            environment[name] = environment.pop(KEPT + name)


def launcher() -> None:
    """Be Paddle's launcher, with the arguments of this process."""
    import paddle

    keep(os.environ, cuda=paddle.is_compiled_with_cuda(), xpu=paddle.is_compiled_with_xpu())
    runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
