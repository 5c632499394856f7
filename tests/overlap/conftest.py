"""Device options of these tests affect the whole simulator: they are reset after each test."""

import contextlib

import pytest
from hal_sim import NoCompiler, options
from hal_sim._native import native

from .schedules import same_names


@pytest.fixture(autouse=True)
def own_settings():
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(NoCompiler):  # the tests report it themselves
            stack.enter_context(options(mode=1, staged=1, polls=8, collective_timeout_ms=20000))
        yield
        with contextlib.suppress(NoCompiler):
            assert native().pending_tasks() == 0, "a schedule left work on the simulator: tests after it would fail"


@pytest.fixture
def one_process(simulator):
    """The simulator, with all ranks of a group in this process."""
    with same_names():
        yield
