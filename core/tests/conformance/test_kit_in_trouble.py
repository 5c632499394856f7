"""A device that ends the process of the kit, or hangs in it, is named with the test that was running."""

import signal
import subprocess

import pytest

from tests import share

WARM = ("numpy", "hypothesis.stateful", "pytest")
pytestmark = pytest.mark.long(20)


TROUBLED = """
import os, signal, sys, time
from hal_core.conformance.report import command
from hal_core.devices.cpu.device import CpuDevice
from hal_core.contract.markers import hookimpl
class Troubled(CpuDevice):
    @hookimpl
    def async_set_value(self, device, target, value, stream):
        {trouble}
sys.modules["troubled"] = sys.modules["__main__"]
factory = lambda: Troubled(0, {{}})
command.SILENCE = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a script ignores it
sys.exit(command.main(["--device-factory=troubled:factory", "--only=G1", "--profile=quick", *sys.argv[1:]]))
"""


CRASH, EXIT = "os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(3)"


@pytest.mark.parametrize(
    ("trouble", "options"),
    share.cases(
        [(trouble, options) for trouble in (CRASH, EXIT) for options in ((), ("--json",))],
        {(CRASH, ()), (EXIT, ("--json",))}.__contains__,
    ),
    ids=["crash-text", "crash-json", "exit-text", "exit-json"],
)
def test_a_device_that_ends_the_process_leaves_the_name_of_the_test(trouble, options, warm):
    done = warm.run(*options, code=TROUBLED.format(trouble=trouble))
    assert done.returncode in (3, -11)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hal conform: the process ended while test_g01_")
    assert last.endswith(" was running")
    assert ("in async_set_value" in done.stderr) == (done.returncode < 0), "where it crashed"


def test_a_device_that_hangs_is_named_with_its_test_while_it_does(warm):
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with warm.start(code=TROUBLED.format(trouble="time.sleep(1000)"), **streams) as process:
        try:
            told = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert told.startswith("hal conform: test_g01_")
    assert told.endswith(" has been running for 0.5 s\n")
    assert "the process ended" not in rest, "it was interrupted, and said so itself"
