"""Honest devices pass the whole kit under each fault: copies that arrive late, and faults that nothing arms."""

import pytest
from hal_conformance.liars.faults import DelayedCopies

from .kit_reports import LIBRARIES
from .test_liars import without_driver, without_simulator

pytestmark = [pytest.mark.conform, pytest.mark.long(120)]
WARM = LIBRARIES
DEVICES = {
    "cpu": ("cpu", str),
    "queue": ("--device-factory=queued_device:queued", str),
    "faulty": ("--device-factory=queued_device:faulty", str),
    "sim": ("sim", without_simulator),
    "opencl": ("opencl", without_driver),
}


def passes(conform, name, *arguments):
    device, missing = DEVICES[name]
    if why := missing():
        pytest.skip(why)
    done = conform(device, "--profile=quick", *arguments, code=0)
    verdict = "conforms, but for G10" if name == "cpu" else "conforms as far as checked"  # cpu: nothing below it counts
    assert f": {verdict}\n" in done.stdout


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "faulty"])
def test_late_copies_change_nothing(conform, name):
    passes(conform, name, f"--fault={DelayedCopies.__name__}")


def test_faults_that_nothing_arms_change_nothing(conform):
    """All lie over the device at once. The tests of faults arm them; some lay them over the device once more."""
    passes(conform, "faulty", "--examples=1")
