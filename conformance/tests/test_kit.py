"""The kit from its users' side: the cpu device passes, failures can be reproduced, expectations must be true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hal_conformance.harness.guarantees import GUARANTEES
from hal_conformance.harness.isolated import KitProcess

from .kit_reports import HANGS, HERE, LIBRARIES, RUN_MODULE, entry, outcomes

pytestmark = pytest.mark.long(60)
WARM = LIBRARIES


@pytest.mark.whole_kit
def test_the_cpu_device_conforms_and_every_guarantee_is_listed(report):
    found = report("cpu", code=0)
    assert found["ok"]
    assert [one["guarantee"] for one in found["guarantees"]] == [guarantee.name for guarantee in GUARANTEES]
    skipped = {one["guarantee"]: one["note"] for one in found["guarantees"] if one["status"] != "checked"}
    assert skipped.keys() == {"G3", "G28"}
    assert "needs async_h2d" in skipped["G3"]
    assert "several ranks" in entry(found, "G13")["note"]
    assert found["header"]["device"] == "cpu:0"
    assert found["header"]["effort"] == {"profile": "quick", "examples": 3, "seed": 0, "shrink": True, "hang": 10.0}


def test_a_guarantee_of_which_nothing_applies_to_the_device_is_no_failure(report):
    found = report("cpu", "--only=G28", code=0)
    assert found["ok"]
    assert entry(found, "G28")["status"] == "skipped"


def drawn(found):
    """The failed test of G11 that draws its examples."""
    name = "test_g11_nothing_of_the_former_request_is_left_in_a_slot"
    (example,) = [test for test in entry(found, "G11")["tests"] if test["outcome"] == "failed" and test["test"] == name]
    return example


@pytest.mark.conform
def test_a_failure_has_a_shrunk_example_and_a_reproducing_command(report):
    """Most of it is shrinking. Its printed output is checked below in ``make test`` too."""
    first = report("cpu", "--liar=NoRowReset", "--only=G11", code=1, examples=0)
    example = drawn(first)
    assert example["kind"] == "AssertionError"
    assert "requests a slot" in example["error"]
    assert example["reproduce"] == "hal conform cpu --only G11 --liar NoRowReset --profile quick --seed 0"
    # By a whole process, as its users run it.
    command = [sys.executable, "-m", "hal_conformance", *example["reproduce"].split()[2:], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    again = drawn(json.loads(done.stdout))
    assert again["error"] == example["error"]


def test_a_liar_of_ones_own_is_named_by_its_module(report):
    """Its set-up is made once it lies over the device, and a failure is reproduced with the folder of its module."""
    found = report("cpu", "--liar=own_liars:ScalarsAreZero", "--only=G1", code=1, examples=1)
    failed = [test for test in entry(found, "G1")["tests"] if test["outcome"] == "failed"]
    again = "hal conform cpu --only G1 --liar own_liars:ScalarsAreZero --profile quick --seed 0 --examples 1"
    assert {(test["kind"], test["reproduce"]) for test in failed} == {("AssertionError", f"PYTHONPATH={HERE} {again}")}


def test_expected_failures_are_reported_with_their_reason(report):
    found = report("--device-factory=kit_devices:true_list", "--only=G1", code=1, examples=1)
    assert outcomes(found, "G1")["test_g01_later_work_on_the_stream_sees_the_value"] == "expected"
    assert "chip errata 7" in entry(found, "G1")["note"]
    assert entry(found, "G1")["status"] == "failed"  # the remaining tests of G1 fail unexpectedly
    failed = [test for test in entry(found, "G1")["tests"] if test["outcome"] == "failed"]
    again = "hal conform --only G1 --device-factory kit_devices:true_list --profile quick --seed 0 --examples 1"
    assert {test["reproduce"] for test in failed} == {f"PYTHONPATH={HERE} {again}"}
    assert {test["kind"] for test in failed} == {"AssertionError"}
    assert not found["problems"]


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("passes", "passes, but is listed as an expected failure"),
        ("unknown", "is not a test of the kit"),
        ("no_reason", "has no reason"),
    ],
)
def test_a_list_of_expected_failures_must_be_true(factory, problem, report):
    found = report(f"--device-factory=kit_devices:{factory}", "--only=G15", code=1)
    assert not found["ok"]
    assert problem in " ".join(found["problems"])


def test_a_plugin_may_offer_tensors_of_its_framework(report):
    found = report("--device-factory=kit_devices:with_tensors", "--only=G5", code=0, examples=1)
    assert outcomes(found, "G5")["test_g05_a_tensor_of_the_framework_is_written_where_it_is"] == "passed"


def test_a_plugin_may_have_its_own_way_for_keys_and_values(report):
    found = report("--device-factory=kit_devices:own_transfers", "--only=G29,G30,G31,G32", code=0, examples=1)
    assert outcomes(found, "G29")["test_g29_blocks_arrive_whole_where_they_were_promised"] == "passed"
    assert outcomes(found, "G29")["test_g29_what_is_left_out_on_its_way_is_missed"] == "skipped"
    assert "cannot be held or changed" in entry(found, "G29")["note"]
    found = report("--device-factory=kit_devices:any_blocks", "--only=G31", code=1)
    assert set(outcomes(found, "G31").values()) == {"failed"}


def test_what_cannot_be_run_is_one_line_with_the_cure(conform):
    assert "not a guarantee (G1 to G32" in conform("cpu", "--only=G99", code=2).stderr
    assert "installed: cpu" in conform("nosuch", code=2).stderr
    assert "name a device" in conform(code=2).stderr


def test_the_report_comes_as_html(tmp_path, conform):
    target = tmp_path / "report.html"
    conform("cpu", "--only=G25", "--profile=quick", "--examples=1", f"--html={target}", code=0)
    page = target.read_text(encoding="utf-8")
    assert "<td>G25</td>" in page
    assert 'class="checked"' in page


def test_a_plugins_own_test_file_is_one_line(tmp_path, warm):
    (tmp_path / "test_mine.py").write_text("from hal_conformance.suite import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nhal_device = cpu\n")
    command = [sys.executable, "-m", "pytest", "-p", "hal_conformance.plugin", "-p", "no:cacheprovider", "-q"]
    chosen = ["--hal-profile=quick", "--hal-only=G24", "--hal-examples=1"]
    done = subprocess.run([*command, *chosen], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^[1-9]\d* passed,( \d+ skipped,)? \d+ deselected", done.stdout, re.MULTILINE), done.stdout
    planned = warm.run(*command[2:], "--setup-plan", code=RUN_MODULE, cwd=tmp_path)
    assert "SETUP    F small" in planned.stdout
    assert "not found" not in planned.stdout, "a fixture lies beside its tests, where only the kit itself finds it"


@pytest.mark.conform
def test_an_asynchronous_device_conforms_and_its_latches_are_used(report):
    found = report("--device-factory=queued_device:queued", code=0)
    skipped = {one["guarantee"]: one["note"] for one in found["guarantees"] if one["status"] != "checked"}
    assert not skipped
    left = len(entry(found, "G13")["tests"]) - 3  # three of them pass in one process
    assert entry(found, "G13")["note"] == f"{left} of {left + 3}: needs several_ranks"
    left_out = [name for name, outcome in outcomes(found, "G3").items() if outcome != "passed"]
    assert all("a_write_to_several" in name for name in left_out)  # the example makes one submission a memory
    assert set(outcomes(found, "G10").values()) == {"passed"}


def test_a_skip_says_why_the_plugin_does_not_offer_what_is_needed(report):
    found = report("--device-factory=kit_devices:no_pair", "--only=G13,G17", code=0, examples=1)
    g13 = entry(found, "G13")  # all but the tests of it that a group of one can pass
    passed = sum(test["outcome"] == "passed" for test in g13["tests"])
    assert passed == 3
    left = len(g13["tests"]) - passed
    assert g13["note"] == f"{left} of {left + passed}: needs several_ranks: two chips are needed"
    assert "needs several_ranks: two chips are needed" in entry(found, "G17")["note"]
    head = found["header"]
    assert (head["runtime"], head["effort"]["profile"], head["limit"]) == ({"driver": "7.1"}, "quick", 300.0)
    assert all(head[name] for name in ("kit", "date", "seconds", "system", "processor", "versions", "reproduce"))
    assert head["skips"]["needs several_ranks: two chips are needed"] >= left


COUNTING = """
import sys
from hal_conformance.ranks import processes as ranks
from hal_conformance.report.command import Options, run
from hal_conformance.ranks.pool import Ranks
made, true = [], ranks.RankPool.__init__
hurt, casualty = set(), Ranks.casualty
def noted(ranks, *given, **named):
    hurt.add(len(made))
    return casualty(ranks, *given, **named)
Ranks.casualty = noted
def counted(pool, *given, **named):
    made.append(pool)
    true(pool, *given, **named)
ranks.RankPool.__init__ = counted
status = run(Options(device="cpu", only="G13,G14,G15,G16,G17,G18", profile="quick", json=True))
running = [p.pid for pool in made for p in pool._processes.values() if p.poll() is None]
needless = sorted({*range(1, len(made))} - hurt)  # pools that were replaced though no test had hurt their ranks
print(len(made), "pools, needless:", needless, "processes left:", running, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.conform
def test_the_cpu_device_conforms_with_several_ranks_in_one_pool():
    done = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(done.stdout)
    chosen = [entry(found, name) for name in ("G13", "G14", "G15", "G16", "G17", "G18")]
    assert {(one["status"], one["note"]) for one in chosen} == {("checked", "")}
    assert len([test for test in outcomes(found, "G16") if "a_lost_rank" in test]) == 2
    assert "pools, needless: [] processes left: []" in done.stderr


@pytest.mark.conform
def test_the_kit_passes_under_copies_that_come_late(report):
    found = report("cpu", "--fault=DelayedCopies", "--only=G12,G19,G20,G22,G23,G24", code=0)
    assert found["ok"]


def test_the_tickets_of_late_copies_are_done_without_a_wait():
    """The fault is a slow device, but not a wrong one: G3 holds under it on a device whose streams can be held."""
    options = ["--hal-device-factory=queued_device:queued", "--hal-fault=DelayedCopies", "--hal-profile=quick"]
    found = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with KitProcess("", *options, "-k", "nobody_asked", environment=found) as run:
        (three,) = [one for one in run.report(HANGS)["guarantees"] if one["guarantee"] == "G3"]
    assert {test["outcome"] for test in three["tests"]} == {"passed"}


def test_a_report_that_could_not_be_written_after_all_fails_the_run(conform):
    done = conform("cpu", "--only=G25", "--profile=quick", "--examples=1", "--report=/dev/full", code=1)
    assert "the report was not written to '/dev/full': No space left on device" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_device_that_answers_by_chance_is_told_as_such_with_both_results(report):
    found = report("--device-factory=kit_devices:by_chance", "--only=G4", code=1, examples=0)
    failed = [test["error"] for test in entry(found, "G4")["tests"] if test["outcome"] == "failed"]
    (message,) = [text for text in failed if "after writes that overlap" in text]
    assert message.startswith("cpu:0 is not deterministic: the same calls gave different results.")
    assert "once: AssertionError: after writes that overlap" in message
    assert "then: every check held" in message


def test_failures_of_one_cause_are_shown_once_and_the_rest_counted(tmp_path, conform):
    arguments = ("--device-factory=kit_devices:broken", "--only=G9,G11", f"--report={tmp_path}/report.json")
    done = conform(*arguments, "--profile=quick", "--examples=1", code=1)
    assert done.stdout.count("    reproduce: ") == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("    with the same cause, ")]
    assert "G11 test_g11_nothing_of_the_former_request_is_left_in_a_slot" in line
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    failed = [test for one in found["guarantees"] for test in one["tests"] if test["outcome"] == "failed"]
    assert len(failed) > 8
    assert f"{len(failed) - 1} more: " in line
    (first,) = [test for test in failed if not test["same_as"]]
    assert {test["same_as"] for test in failed if test is not first} == {first["test"]}
    assert all("driver error" in test["error"] for test in failed), "the report as data has each of them"


@pytest.mark.conform  # half a minute of waits
def test_an_update_that_waits_for_the_device_is_told_once_with_both_cures(report):
    found = entry(report("--device-factory=kit_devices:waits", "--only=G28", code=1), "G28")["tests"]
    (failed,) = [test for test in found if test["outcome"] == "failed"]
    assert "update_inputs did not return while its stream was held" in failed["error"]
    assert "provide a kernel: override update_inputs()" in failed["error"]
    assert "update_waits = True in the plugin's Support" in failed["error"]
    assert any(test["outcome"] == "skipped" for test in found), "what needs a held step waits for no further latch"


def test_a_test_runs_where_a_guarantee_is_chosen_that_it_checks_besides(report):
    found = report("cpu", "--only=G20", code=0, examples=1)
    assert "test_g18_a_leaving_waits_for_the_step_that_names_its_slot[first rank]" in outcomes(found, "G18")
    assert entry(found, "G26")["tests"] == []
