"""Environment of hal's child processes, and their tie to their parent."""

from __future__ import annotations

import os
import sys

PARENT = "HAL_RANKS_PARENT"
"""Variable with the id of the parent process, for a child that is tied to it."""
TIED = (
    "import ctypes, os, signal; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    f"os.getppid() == int(os.environ['{PARENT}']) or os._exit(1); os.environ['{PARENT}'] = str(os.getpid()); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}); "
)
"""First code of a child process: the kernel ends it with the thread that started it (PR_SET_PDEATHSIG), whatever the
child does then. It ends at once if the parent has died already, and heeds SIGTERM, which a command holds back while it
opens an engine."""
API_KEY = "HAL_API_KEY"
"""Variable with the key of ``hal serve``: the server's own, which no child gets."""


def environment() -> dict[str, str]:
    """Return the environment for a child that imports what this process imports, and is quiet about warnings."""
    paths = os.pathsep.join(path for path in sys.path if path)
    added = {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", PARENT: str(os.getpid())}
    return {name: value for name, value in os.environ.items() if name != API_KEY} | added
