"""Runs of the kit that cannot be as they should: broken devices, late ranks, interrupts."""

import itertools
import json
import os
import pickle
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hal_conformance.ranks.processes import RankPool
from hal_core.errors import TicketTimeout

from .kit_reports import LIBRARIES, entry

WARM = LIBRARIES
pytestmark = pytest.mark.long(20)


TROUBLED = """
import os, signal, sys, time
from hal_conformance.report import command, supervisor
from hal_core.devices.cpu.device import CpuDevice
from hal_core.contract.markers import hookimpl
class Troubled(CpuDevice):
    @hookimpl
    def async_set_value(self, device, target, value, stream):
        {trouble}
sys.modules["troubled"] = sys.modules["__main__"]
factory = lambda: Troubled(0, {{}})
supervisor.MOST = 2
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a script ignores it
sys.exit(command.main(["--device-factory=troubled:factory", "--only=G1", "--profile=quick", *sys.argv[1:]]))
"""


EXITS = """"primitives" in os.environ["PYTEST_CURRENT_TEST"] or os._exit(3)
        return super().async_set_value(device, target, value, stream)"""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_device_that_ends_every_process_is_stopped_after_some(options, warm):
    done = warm.run(*options, code=TROUBLED.format(trouble=EXITS))
    assert done.returncode == 1
    assert "the process ended with exit status 3, in this test" in done.stdout
    assert "2 tests have ended their process: mend them first" in done.stdout
    if options:
        ended = [test["outcome"] for test in entry(json.loads(done.stdout), "G1")["tests"]]
        assert (ended.count("failed"), "not run" in ended) == (2, True)


STREAMS = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def test_an_interrupted_run_has_no_verdict(warm):
    with warm.start(
        "--json", code=TROUBLED.format(trouble="os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"), **STREAMS
    ) as process:
        out, _ = process.communicate(timeout=60)
    report = json.loads(out)
    assert process.returncode == 2
    assert (report["ok"], report["unfinished"]) == (None, "interrupted")
    assert {entry(report, name)["status"] for name in ("G1", "G2")} == {"not run", "skipped"}


LOSES = """
import gc, os, signal, sys
from hal_conformance.report import command
class Loses:
    def pytest_sessionfinish(self):
        gc.callbacks.append(lambda phase, _: phase == "stop" and os.kill(os.getpid(), signal.SIGTERM))
        gc.collect()
        gc.callbacks.pop()
sys.exit(command.main(["cpu", "--profile=quick", "--only=G25", "--examples=1"], [Loses()]))
"""


def test_an_interrupt_that_is_lost_in_a_callback_leaves_no_traceback(warm):
    done = warm.run(code=LOSES)
    assert "1 checked" in done.stdout
    for word in ("Traceback", "Exception ignored", "Warning"):
        assert word not in done.stdout + done.stderr


STOPPED = """
import signal, sys
from hal_conformance.report import command
class Stops:
    def pytest_collection(self):
        raise KeyboardInterrupt
sys.exit(command.main(["cpu", "--profile=quick", *sys.argv[1:]], [Stops()]))
"""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_run_that_was_interrupted_before_its_first_test_says_so(options, warm):
    done = warm.run(*options, code=STOPPED)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (2, "", "hal conform: interrupted\n")


BROKEN = """
import sys
from hal_conformance.report import command
class Breaks:
    def pytest_pycollect_makemodule(self, module_path):
        if module_path.name == "test_readers.py":
            raise ImportError("a module of the kit is broken")
sys.exit(command.main(["cpu", "--profile=quick", *sys.argv[1:]], [Breaks()]))
"""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_errors_of_collection_are_printed_and_no_interrupt(options, warm):
    done = warm.run(*options, code=BROKEN)
    printed = done.stdout + done.stderr
    assert done.returncode == 2
    assert "was not collected: ImportError: a module of the kit is broken" in printed
    assert "hal conform: interrupted" not in printed


LATE = """
import sys
from hal_conformance.ranks import pool
from hal_conformance.report import command
pool.STARTING = 0.0
pool.RankPool._kept_waiting = lambda pool: 0.0
sys.exit(command.main(["cpu", "--profile=quick", "--only=G13", "--json"]))
"""


def test_ranks_that_are_not_up_in_time_are_no_failure_of_the_device(warm):
    done = warm.run(code=LATE)
    report = json.loads(done.stdout)
    guarantee = entry(report, "G13")
    assert (done.returncode, report["ok"], guarantee["status"]) == (1, None, "not run")
    assert report["unfinished"].startswith("the kit's ranks are not up: rank 0 did not answer within 0 s (it is here")
    assert {test["outcome"] for test in guarantee["tests"]} == {"passed", "not run"}


class Link:
    """The end of a rank's pipe, which has the answer when it is looked at for the third time."""

    looks = 0

    def poll(self, seconds):
        self.looks += 1
        return self.looks == 3

    def recv_bytes(self):
        return pickle.dumps((True, "done"))


@pytest.mark.parametrize("starved", [True, False])
def test_time_in_which_a_rank_has_no_processor_does_not_count(starved):
    pool, waits = RankPool.__new__(RankPool), itertools.count()
    pool._links = {0: Link()}
    pool._kept_waiting = lambda: 1000.0 * next(waits) if starved else 0.0
    pool._stacks = lambda rank: "nowhere"
    if starved:
        assert pool.finish([0], timeout=0.0) == {0: "done"}
    else:
        with pytest.raises(TicketTimeout, match="rank 0 did not answer"):
            pool.finish([0], timeout=0.0)


def test_how_long_a_process_had_no_processor_is_what_the_kernel_counts():
    pool = RankPool.__new__(RankPool)
    pool._processes = {0: SimpleNamespace(pid=os.getpid()), 1: SimpleNamespace(pid=2**30)}
    waited = Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]
    assert int(waited) / 1e9 <= pool._kept_waiting() < 1e6


FAILS = "raise KeyError('a fault of the plugin')"


def test_a_failed_test_shows_the_traceback_of_what_the_plugin_raised(warm):
    done = warm.run("--json", code=TROUBLED.format(trouble=FAILS))
    errors = [test["error"] for test in entry(json.loads(done.stdout), "G1")["tests"] if test["outcome"] == "failed"]
    assert errors
    assert all("Traceback (most recent call last)" in error for error in errors)
    assert any("in async_set_value" in error and "pluggy" not in error for error in errors)


OPENING = """
import sys
from hal_conformance.report import command
def driver():
    raise KeyError("no such chip")
def factory():
    driver()
sys.modules["troubled"] = sys.modules["__main__"]
sys.exit(command.main(["--device-factory=troubled:factory", "--only=G1", "--profile=quick", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_a_device_that_is_not_opened_shows_why_without_a_banner(options, warm):
    done = warm.run(*options, code=OPENING)
    assert done.returncode == 4
    assert done.stderr.endswith("\nhal conform: error: troubled:factory was not opened: KeyError: 'no such chip'\n")
    assert ", in driver\n" in done.stderr
    assert "!!!" not in done.stdout + done.stderr
