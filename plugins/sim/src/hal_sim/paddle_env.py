"""Registration of the device with Paddle, by environment variables that must be set before ``import paddle``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hal_core import Unavailable

from hal_sim.build import paddle_device
from hal_sim.settings import set_option
from hal_sim.streams import Stream

DEFAULT_NAME = "hal_sim"


def environment(name: str = DEFAULT_NAME, **options: int) -> dict[str, str]:
    """Return the variables with which a process finds the device, built if necessary, under the device type ``name``.

    ``options`` are the simulator's (``mode=2``, ``devices=4``, ``staged=0``, …).
    """
    variables = {
        "CUSTOM_DEVICE_ROOT": str(paddle_device().parent),
        "HALSIM_NAME": name,
        # The spelling is glog's. Paddle logs six lines for each library that it loads; warnings and errors still
        # appear.
        "GLOG_minloglevel": os.environ.get("GLOG_minloglevel", "1"),  # noqa: SIM112
    }
    return variables | {f"HALSIM_{key.upper()}": str(value) for key, value in options.items()}


def distributed(
    rank: int, endpoints: Sequence[str], master: str, name: str = DEFAULT_NAME, **options: int
) -> dict[str, str]:
    """Return the variables of one rank of ``paddle.distributed`` over the simulated collectives."""
    return environment(name, **options) | {
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": name,  # needed by Paddle up to 3.2
        f"FLAGS_selected_{name}s": str(rank),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": master,
    }


def announce(name: str = DEFAULT_NAME, **options: int) -> None:
    """Set the variables in this process. Paddle must not be imported yet, unless it has the device already."""
    loaded = sys.modules.get("paddle")
    if loaded is not None:
        if name in loaded.device.get_all_custom_device_type():
            return
        raise Unavailable(
            f"paddle was imported before the simulated device '{name}' was announced",
            cure="call hal_sim.paddle_env.announce(), or set CUSTOM_DEVICE_ROOT, before the first import of paddle",
            device="sim",
        )
    os.environ.update(environment(name, **options))
    for key, value in options.items():  # the library may be loaded already, and reads the environment only once
        set_option(key, value)


def current_stream(device: int = 0, name: str = DEFAULT_NAME) -> Stream:
    """Return Paddle's current stream on this device, as a stream of this module."""
    import paddle

    return Stream.adopt(paddle.device.current_stream(f"{name}:{device}").stream_base.raw_stream)
