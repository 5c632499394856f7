"""An observer in the workers of an episode (``episode_ranks.py``): it counts steps, slows them, and hangs on request.

The environment names the episode's folder. It contains ``steps-PID`` with a byte for each step of a process; if the
file ``hang-PID`` exists, the next step of that process never returns, while its other threads live.
"""

import os
import threading
import time
from pathlib import Path

from hal_core import hookimpl


class Steps:
    """See above."""

    def __init__(self):
        folder, pid = Path(os.environ["HAL_EPISODE"]), os.getpid()
        self._hang = folder / f"hang-{pid}"
        self._out = os.open(folder / f"steps-{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._pace = float(os.environ["HAL_EPISODE_PACE"])

    @hookimpl(wrapper=True)
    def save_output(self):
        os.write(self._out, b".")
        if self._hang.exists():
            threading.Event().wait()
        time.sleep(self._pace)
        return (yield)
