"""The conformance kit on the cuda device over the stand-in driver: all native code, without a GPU."""

import importlib.util
import os
from pathlib import Path

import pytest
from hal_conformance.harness.isolated import KitProcess

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hypothesis") is None, reason="the kit needs paddle-hal-core[conformance]"
)


def conforms(path, *arguments):
    """Run the kit; return its report."""
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"HAL_CUDA_NATIVE": str(int(path == "native")), "PYTHONPATH": paths}
    given = ["--hal-device-factory=kit_native:opened", "--hal-profile=quick", "--hal-seed=5", *arguments]
    with KitProcess("", *given, environment=environment) as run:
        return run.report()


RANKS = "G13,G14,G15,G16,G17,G18"


@pytest.mark.conform
def test_the_native_path_conforms_with_ranks():
    """Over the stand-in for NCCL: four processes, with lost and hung ranks."""
    assert conforms("native", f"--hal-only={RANKS}", "-k", "test_ranks or test_broadcast or test_rank_modes")


@pytest.mark.conform
@pytest.mark.parametrize("path", ["native", "fallback"])
def test_each_path_conforms(path):
    """The whole kit except states beyond 4 GiB, which would be host memory here."""
    assert conforms(path, "-k", "not past_4_gib")
