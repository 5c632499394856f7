"""The job of this process over ``paddle.distributed``: joining it, and exchanging blocks of bytes.

Paddle is imported by the functions, never by the module.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from ....errors import GroupLost, InvalidValue, Unavailable
from ....timeouts import TIMEOUTS
from ..processor import check_processor


def join_world(*, backend: str = "gloo", timeout: float | None = None) -> tuple[int, int]:
    """Join the job that the environment describes (``PADDLE_TRAINER_*``); return ``(global rank, ranks)``.

    Idempotent. ``timeout``: seconds that the first rank may take to listen; by default ``TIMEOUTS.collective``.
    """
    _check_environment()
    os.environ.setdefault("PADDLE_DISTRI_BACKEND", backend)
    dist = distributed()
    if not dist.is_initialized():
        if int(os.environ["PADDLE_TRAINER_ID"]) != 0:
            address = os.environ.get("PADDLE_MASTER") or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
            host, _, port = address.rpartition(":")
            wait_for_listener(host.strip("[]"), int(port), TIMEOUTS.collective if timeout is None else timeout, 0)
        dist.init_parallel_env()
        dist.barrier()
    return dist.get_rank(), dist.get_world_size()


def exchange_blocks(
    block: bytes,
    me: int,
    ranks: Sequence[int],
    broadcast: Callable[[Any, int], None],
    on: Any = None,  # noqa: ANN401 (a Paddle place)
) -> dict[int, bytes]:
    """Return every rank's block, by global rank, over tensors on the place ``on``; by default that of the job's
    collectives.

    All blocks have the same size; waits for the device.
    """
    import paddle

    on, found = place() if on is None else on, {}
    for rank in ranks:
        mine = np.frombuffer(block, np.uint8) if rank == me else np.zeros(len(block), np.uint8)
        tensor = paddle.to_tensor(mine, place=on)
        broadcast(tensor, rank)
        found[rank] = tensor.numpy().tobytes()
    return found


def _check_environment() -> None:
    wanted = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")
    absent = [name for name in wanted if not os.environ.get(name)]
    if absent:
        raise InvalidValue(
            f"this process is not a rank of a job: {', '.join(absent)} not set",
            cure="start the ranks with python -m paddle.distributed.launch, or set these variables",
            argument="group",
        )


def wait_for_listener(host: str, port: int, timeout: float, rank: int) -> None:
    """Wait until a rank listens. Paddle itself tries once and again only after 3 s, and may never give up."""
    deadline = monotonic() + timeout
    pause = threading.Event()
    while True:
        try:
            socket.create_connection((host, port), max(0.001, deadline - monotonic())).close()
            return
        except OSError as error:
            if monotonic() > deadline:
                raise GroupLost(
                    f"rank {rank} did not listen at {host}:{port} within {timeout:g} s: {error}",
                    cure="check whether the rank was started, and PADDLE_MASTER or PADDLE_TRAINER_ENDPOINTS",
                    argument="group",
                ) from error
        pause.wait(TIMEOUTS.listening_look)


def place() -> Any:  # noqa: ANN401 (a Paddle place, or None for the current one)
    import paddle

    return paddle.CPUPlace() if os.environ.get("PADDLE_DISTRI_BACKEND") == "gloo" else None


def distributed() -> Any:  # noqa: ANN401 (a module without types)
    check_processor()
    try:
        import paddle.distributed as dist
    except ImportError as error:
        raise Unavailable(
            f"several ranks need Paddle, which cannot be imported: {error}",
            cure="pip install 'paddlepaddle>=3.1,<3.4' setuptools, or a Paddle build for your device",
            argument="group",
        ) from error
    return dist
