"""The conformance kit on the cuda device over the driver that stands in for CUDA's: all native code, without a GPU."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hal_core.conformance.harness.isolated import KitProcess

HERE = Path(__file__).parent
PARTS = (
    "test_insert_tasks test_async_set_value test_save_output test_streams test_asynchrony test_machine "
    "test_late_insertions test_submissions"
)
"""What the native part does, in the quick profile; the rest is the core's own, which other devices test."""
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hypothesis") is None, reason="the kit needs paddle-hal-core[conformance]"
)


def conforms(path, *arguments):
    """Run the kit; its report."""
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"HAL_CUDA_NATIVE": str(int(path == "native")), "PYTHONPATH": paths}
    given = ["--hal-device-factory=kit_native:opened", "--hal-profile=quick", "--hal-seed=5", *arguments]
    with KitProcess("", *given, environment=environment) as run:
        return run.report()


@pytest.mark.long(12)
def test_the_native_path_conforms_in_what_it_does():
    assert conforms("native", "--hal-examples=2", "-k", " or ".join(PARTS.split()))


@pytest.mark.conform
@pytest.mark.parametrize("path", ["native", "python"])
def test_both_paths_conform(path):
    """The whole kit but for states beyond 4 GiB, which would be host memory here."""
    assert conforms(path, "-k", "not past_4_gib")
