"""Process of a rank that :mod:`hal_engine.distributed.launch` started."""

from __future__ import annotations

import math
import os
import signal
import sys

from hal_core import HalError, InvalidValue

from hal_engine.timeouts import TIMEOUTS

from .launch import URL
from .rank import serve

LOST, REFUSED = 1, 2
"""Exit statuses: ranks were lost; the start was refused."""


def main() -> int:
    """Run the rank that the environment describes. Return its exit status."""
    rank, size = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    status = 0
    try:
        serve(os.environ[URL], rank, size)
    except InvalidValue as error:
        print(f"hal: rank {rank}: {error}", file=sys.stderr, flush=True)
        status = REFUSED
    except HalError as error:
        print(f"hal: rank {rank}: {error}", file=sys.stderr, flush=True)
        status = LOST
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(TIMEOUTS.ranks_end_forced if status else TIMEOUTS.interpreter_end))
    return status
