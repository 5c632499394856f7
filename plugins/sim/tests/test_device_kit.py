"""The conformance kit on the sim device, in its strictest modes, without a finding of the checker.

``python -m pytest -p hal_conformance.plugin -p hal_sim.pytest_races --pyargs hal_conformance --hal-device=sim`` runs it
by hand; ``HALSIM_MODE`` and ``HALSIM_STAGED`` choose the mode.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long(45)


OVERLAP = "G1,G23,G28"
"""The guarantees whose tests let most work overlap, for `make test`; `make conform` also runs the whole kit, lazy."""


@pytest.mark.parametrize(
    ("mode", "some"), [pytest.param("worker", (), marks=pytest.mark.conform), ("lazy", (f"--hal-only={OVERLAP}",))]
)
def test_the_device_conforms(mode, some, built):
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-p", "hal_conformance.plugin", "-p", "hal_sim.pytest_races", "--pyargs", "hal_conformance"]
    ours = "not g27"  # it reads the sources of the core: once, for cpu, is enough
    command += ["--hal-device=sim", "--hal-profile=quick", "--hal-examples=2", "--hal-hang=60", "-k", ours, *some]
    number = {"eager": 0, "worker": 1, "lazy": 2}[mode]
    environment = os.environ | {"HALSIM_MODE": str(number), "HALSIM_STAGED": "0", "HALSIM_CREATION_WAITS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "conforms as far as checked" in done.stdout
