"""A function's calls as a recording, and the device that replays it."""

from contextlib import closing

import pytest
from hal_conformance.opening import subject
from hal_conformance.replay.recorder import CallRecorder
from hal_core import bind
from hal_core.devices.cpu.device import CpuDevice


@pytest.fixture
def recorded(tmp_path):
    """Record a function's calls on an opened device; return the file."""
    numbers = iter(range(100))

    def record(work):
        path = tmp_path / f"{next(numbers)}.rec"
        with bind(CpuDevice(0, {})) as bound, closing(CallRecorder(path, bound)):
            work(bound)
        return path

    return record


@pytest.fixture(scope="module")
def cpu():
    return subject("cpu")
