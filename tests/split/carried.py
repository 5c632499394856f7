"""A third-party transfer for ``--transfer``: it wraps hal's own, and leaves a file for each call."""

import os
from pathlib import Path

from hal_engine.handover import open_transfer

CARRIER = "tests.split.carried:Carrier"
FOLDER = "HAL_TEST_CARRIED"
"""The variable that names the folder of these files."""


def calls_in(folder):
    """Return each method that was called, and the processes that called it."""
    calls = [path.name.split() for path in folder.iterdir()]
    return {name: {process for call, process in calls if call == name} for name, _ in calls}


class Carrier:
    """See :class:`hal_core.handover.KvTransfer`."""

    def __init__(self, setup):
        assert setup.device.capabilities
        self._inner = open_transfer(setup.cache)
        self._folder = Path(os.environ[FOLDER])

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*given):
            (self._folder / f"{name} {os.getpid()}").touch()
            return found(*given)

        return call
