"""A case that crashes, hangs or exits is a failed case of a report that judges the rest, whatever ends the command."""

import json
import os
import signal
import subprocess
from xml.etree import ElementTree

import pytest

from .kit_reports import HERE, LIBRARIES, RUN_MODULE, entry, outcomes

WARM = LIBRARIES
pytestmark = pytest.mark.long(30)
CRASH = "test_g26_closing_one_device_leaves_another_as_it_was"
HANG = "test_g26_a_context_closes_the_device_and_keeps_the_error_under_way"
LEAK = "test_g26_hundreds_of_calls_keep_nothing[hooks]"
QUICK = ("--only=G26", "--profile=quick", "--examples=1", "--hang=0.1")


def test_a_crash_a_hang_and_a_leak_are_three_failed_cases_of_one_report(conform, tmp_path):
    files = [tmp_path / f"report.{end}" for end in ("json", "xml", "html")]
    done = conform("--device-factory=kit_devices:wrecked", *QUICK, *(f"--report={file}" for file in files), code=1)
    report = json.loads(files[0].read_text(encoding="utf-8"))
    tests = {test["test"]: test for one in report["guarantees"] for test in one["tests"]}
    assert {name for name, test in tests.items() if test["outcome"] == "failed"} == {CRASH, HANG, LEAK}
    assert {test["outcome"] for test in tests.values()} == {"passed", "skipped", "failed"}, "the rest was judged"
    assert tests[CRASH]["error"].startswith("the process ended with SIGSEGV, in this test")
    assert tests[HANG]["error"].startswith("no sign of progress for 3 s, in this test")
    for name in (CRASH, HANG):
        assert tests[name]["error"].index(" in copy_out") < tests[name]["error"].index(" in <lambda>"), "where it was"
        assert "hal_conformance" not in tests[name]["error"].replace(f"{HERE}", "")
        assert tests[name]["reproduce"].endswith("--profile quick --seed 0 --examples 1 --hang 0.1 --only G26")
    assert f"first failure: G26 {CRASH}: crash" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" 1 failed, 21 not chosen (--only): does not conform")
    assert done.stdout.count("hal conformance: ") == 1
    suite = ElementTree.parse(files[1]).getroot()
    failed = {case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None}
    assert failed == {CRASH, HANG, LEAK}
    assert (suite.get("failures"), suite.get("tests")) == ("3", str(len(tests)))
    assert CRASH in files[2].read_text(encoding="utf-8")


def test_expected_failures_hold_a_crash_and_a_hang_and_go_stale_loudly(report):
    found = report("--device-factory=kit_devices:held_wrecks", *QUICK, f"--skip={LEAK}", code=1)
    ended = outcomes(found, "G26")
    assert (ended[CRASH], ended[HANG], ended[LEAK]) == ("expected", "expected", "skipped")
    (problem,) = found["problems"]
    assert "test_g26_a_state_and_memory_of_another_opened_device_are_refused passes, but is listed" in problem
    claims = entry(found, "G26")["claims"]
    assert f"allowed: {LEAK}: left out (--skip)" in claims
    assert f"allowed: {CRASH}: it crashes: errata 8" in claims


def test_a_test_to_be_left_out_must_exist(conform):
    done = conform("cpu", "--skip=test_g25_no_such", "--only=G25", "--profile=quick", code=4)
    assert done.stderr.splitlines()[-1].startswith(
        "hal conform: error: skip: 'test_g25_no_such' is not a test of the kit ("
    )


def test_a_device_that_ends_the_process_when_it_is_opened_is_opened_once(conform, tmp_path):
    target = tmp_path / "report.json"
    done = conform("--device-factory=kit_devices:never_opens", "--profile=quick", f"--report={target}", code=1)
    report = json.loads(target.read_text(encoding="utf-8"))
    (problem,) = report["problems"]
    assert problem.startswith("the process ended with SIGSEGV, while test_g01_")
    assert "opened the device" in problem
    assert "in __init__" in problem
    assert "opened the device" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda one: one.name)
def test_a_signal_to_the_command_leaves_a_report(number, warm, tmp_path):
    """Also while the case hangs in C, and the signal comes twice."""
    target = tmp_path / "report.json"
    command = ("--device-factory=kit_devices:wrecked", "--only=G26", "--profile=quick", f"--report={target}")
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with warm.start("hal_conformance", *command, code=RUN_MODULE, env=environment, **streams) as process:
        line = next(line for line in process.stdout if CRASH in line)  # the next one hangs
        process.send_signal(number)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    report = json.loads(target.read_text(encoding="utf-8"))
    assert process.returncode == 2, out + err
    assert line.startswith("first failure")
    assert (report["ok"], report["unfinished"], report["verdict"]) == (None, "interrupted", "no verdict")
    assert outcomes(report, "G26")[CRASH] == "failed"
    assert "Traceback" not in err
