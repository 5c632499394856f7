"""Honest devices pass the kit under each fault: the whole kit where copies arrive late, and the guarantees whose tests
use a fault where nothing arms it."""

import re
from pathlib import Path

import hal_conformance
import pytest
from hal_conformance.liars.faults import FAULTS, DelayedCopies

from .test_liars import without_driver, without_simulator

pytestmark = [pytest.mark.conform, pytest.mark.long(120)]
WARM = ("numpy", "hypothesis.stateful", "pytest")
DEVICES = {
    "cpu": ("cpu", str),
    "queue": ("--device-factory=queued_device:queued", str),
    "sim": ("sim", without_simulator),
    "opencl": ("opencl", without_driver),
}


def passes(conform, name, *arguments):
    device, missing = DEVICES[name]
    if why := missing():
        pytest.skip(why)
    done = conform(device, "--profile=quick", *arguments, code=0)
    assert "conforms as far as checked" in done.stdout


@pytest.mark.parametrize("name", DEVICES)
def test_late_copies_change_nothing(conform, name):
    passes(conform, name, f"--fault={DelayedCopies.__name__}")


@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS if fault is not DelayedCopies])
def test_a_fault_that_nothing_arms_changes_nothing(conform, fault):
    """The tests of faults arm them; some lay them over the device once more."""
    passes(conform, "queue", f"--fault={fault}", "--examples=1", f"--only={','.join(used_in(fault))}")


def used_in(fault):
    """Return the guarantees of the kit's files that name a fault."""
    texts = [file.read_text() for file in Path(hal_conformance.__file__).parent.glob("test_*.py")]
    found = {number for text in texts if fault in text for number in re.findall(r"@guarantee\((\d+)", text)}
    assert found, fault
    return [f"G{number}" for number in sorted(found, key=int)]
