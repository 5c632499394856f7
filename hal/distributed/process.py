"""The process of a rank that Paddle's launcher has started (:mod:`hal.distributed.launch`)."""

from __future__ import annotations

import os
import signal
import sys

from hal_core import HalError, InvalidValue

from .launch import STORE, URL
from .rank import serve

LOST, REFUSED = 1, 2
"""Exit statuses: ranks were lost; the start was refused."""
LEAVING, IN_ORDER = 5, 60
"""Seconds that the process may take to end after a loss, since leaving a device may wait for a collective that never
ends; and after a run that went well, where nothing does, but the host may be busy."""


def main() -> int:
    """Be the rank that the environment says; the exit status."""
    rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    status = 0
    os.environ["PADDLE_MASTER"] = os.environ[STORE]  # in place of the launcher's, which anybody may have taken
    try:
        serve(os.environ[URL], rank, size)
    except InvalidValue as error:
        print(f"hal: rank {rank}: {error}", file=sys.stderr, flush=True)
        status = REFUSED
    except HalError as error:
        print(f"hal: rank {rank}: {error}", file=sys.stderr, flush=True)
        status = LOST
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVING if status else IN_ORDER)
    return status
