"""The report as vendors meet it: primitives first, the first failure at once, text, JSON and HTML of one run."""

import importlib
import json
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hal_conformance.kit import Effort
from hal_conformance.report import machine, reproduction
from hal_conformance.report.outcomes import LONGEST, Report, clipped
from hal_conformance.report.rendering import render
from hal_conformance.report.report import cause_of, message_of

from .kit_reports import LIBRARIES

pytestmark = pytest.mark.long(15)
WARM = LIBRARIES


def test_one_run_writes_text_json_and_html(tmp_path, conform):
    data, page = tmp_path / "report.json", tmp_path / "page.html"
    quick = ("--only=G25", "--profile=quick", "--examples=1")
    done = conform("cpu", *quick, f"--report={data}", f"--html={page}", code=0)
    assert "  G25  ok " in done.stdout
    assert json.loads(data.read_text(encoding="utf-8"))["ok"] is True
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    done = conform("cpu", *quick, "--json", f"--html={page}", code=0)
    assert json.loads(done.stdout)["ok"] is True


def test_an_unwritten_primitive_stops_the_run_in_thirty_lines(conform, tmp_path):
    report = tmp_path / "report.json"
    done = conform(
        "--device-factory=kit_devices:unwritten", "--profile=quick", "--examples=1", f"--report={report}", code=1
    )
    lines = done.stdout.splitlines()
    found = json.loads(report.read_text(encoding="utf-8"))
    ran = [test["test"] for entry in found["guarantees"] for test in entry["tests"] if test["outcome"] != "not run"]
    assert len(ran) == 1, ran
    assert len(lines) <= 30, done.stdout
    assert max(map(len, lines)) < LONGEST + 200
    assert "stopped: the primitives fail, by which every other test reads and writes" in done.stdout
    assert any(test["error"].count("x") >= 12_000 for entry in found["guarantees"] for test in entry["tests"])


def test_the_first_failure_is_shown_when_it_happens(conform):
    quick = ("--only=G4", "--profile=quick", "--examples=1")
    lines = conform("--device-factory=kit_devices:deaf", *quick, code=1).stdout.splitlines()
    shown = [at for at, line in enumerate(lines) if line.startswith("first failure: G4 test_g04_")]
    assert len(shown) == 1, lines
    last = next(at for at, line in enumerate(lines) if "[100%]" in line)
    assert shown[0] < last, "the tests after the first failure ran before it was shown"


def test_a_long_line_is_clipped_on_the_terminal():
    assert clipped("short") == "short"
    assert clipped("y" * 5000).endswith("(5000 characters, whole in --report FILE)")
    assert len(clipped("y" * 5000)) < LONGEST + 60


def line_of(monkeypatch, arguments, ini="", environment=(), made=None, **effort):
    """Return the reproduction line of a failed test of G5 in a run with these arguments of pytest."""
    for name, value in environment:
        monkeypatch.setenv(name, value)
    options = {"plugins": ["no:cacheprovider", "hal_conformance.plugin"], "--hal-device": ""} | dict.fromkeys(
        [f"--hal-{flag}" for flag in reproduction.FLAGS], ""
    )
    config = SimpleNamespace(getoption=(options | arguments).get, getini=lambda _: ini)
    found = reproduction.Reproduction(config)
    kit = made and SimpleNamespace(effort=Effort("default", seed=7, **effort))
    if made:
        found.opened(*made)
    monkeypatch.setenv("HALSIM_NAME", "set while it was opened")
    return found.line(kit, "G5")


def test_a_reproduction_line_has_the_variables_of_device_and_substitute(monkeypatch):
    set_before = [("HAL_MACA_PLACE", "sim"), ("HALSIM_MODE", "2"), ("HAL_OTHER_MODE", "1"), ("HALSIM_DIR", "a b")]
    line = line_of(monkeypatch, {"--hal-device": "maca"}, "", set_before, ("maca (substituted: sim)", "sim"))
    assert line == (
        "HALSIM_DIR='a b' HALSIM_MODE=2 HAL_MACA_PLACE=sim hal conform maca --only G5 --profile default --seed 7"
    )


def test_a_reproduction_line_has_the_folder_of_this_runs_factory(monkeypatch, tmp_path):
    (tmp_path / "own_device.py").write_text("make = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    importlib.import_module("own_device")
    factory = {"--hal-device-factory": "own_device:make"}
    line = line_of(monkeypatch, factory, made=("own", ""))
    monkeypatch.delitem(sys.modules, "own_device")
    command = "hal conform --only G5 --device-factory own_device:make --profile default --seed 7"
    assert line == f"PYTHONPATH={tmp_path} {command}"
    installed = {"--hal-device-factory": "hal_core.devices.cpu:CpuPlugin"}
    assert line_of(monkeypatch, installed, made=("own", "")).startswith("hal conform ")


def test_a_reproduction_line_keeps_the_plugins_of_pytest(monkeypatch):
    """hal conform takes none: a test that fails by a plugin would pass there."""
    plugins = {"plugins": ["hal_sim.pytest_races"], "--hal-device": ""}
    line = line_of(monkeypatch, plugins, "sim", made=("sim", ""), environment=[("HALSIM_STAGED", "0")])
    assert line == (
        "HALSIM_STAGED=0 python -m pytest -p hal_conformance.plugin -p hal_sim.pytest_races --pyargs hal_conformance "
        "--hal-device sim --hal-only G5 --hal-profile default --hal-seed 7"
    )


def test_a_reproduction_line_has_a_hang_of_ones_own(monkeypatch):
    line = line_of(monkeypatch, {"--hal-device": "cpu"}, made=("cpu", ""), hang=60.0)
    assert line == "hal conform cpu --only G5 --profile default --seed 7 --hang 60"


def test_without_hal_the_kit_itself_is_the_command(monkeypatch):
    monkeypatch.setattr(reproduction, "find_spec", lambda _: None)
    assert line_of(monkeypatch, {"--hal-device": "cpu"}) == "python -m hal_conformance cpu --only G5"


def test_a_device_that_does_not_open_is_reported_in_a_few_lines(conform):
    """The header of the report needs no device: it would open one more."""
    done = conform("--device-factory=kit_devices:unopened", "--profile=quick", code=4)
    assert "kit_devices:unopened was not opened: NotImplementedError: stream_create" in done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) <= 12, done.stdout + done.stderr
    assert any("kit_devices.py" in line for line in lines), "the frames are those of the plugin"


def test_a_foreign_error_is_shown_once_with_draws_and_plugin_frames(conform):
    quick = ("--only=G5", "--profile=quick", "--examples=20")
    out = conform("--device-factory=kit_devices:stumbles", *quick, code=1).stdout
    assert "= FAILURES =" not in out
    first, last = out.index("first failure: G5 "), out.index("hal conformance: ")
    report = out[last:]
    assert "kit_devices.py" in out[first:last], "the first failure has the place in the plugin"
    assert report.count("KeyError: 'no entry for three axes'") == 1
    assert report.count("Draw 1 (") == 1
    assert "in stumble\n" in report
    assert "^^^" not in report
    assert "data=data" not in report


def test_a_kit_outside_its_checkout_is_named_by_its_files(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "KIT", tmp_path)
    (tmp_path / "plugin.py").write_text("first")
    first = machine.revision()
    (tmp_path / "plugin.py").write_text("second")
    assert first.startswith("files ")
    assert machine.revision() != first


def test_a_junit_report_says_what_failed_was_left_out_and_not_run():
    """Also what a driver's message may contain, and XML may not."""
    ended = {"failed": "a driver's \x1b[31mred\x00 <word>", "skipped": "", "expected": "", "not run": "", "passed": ""}
    tests = [{"test": name, "outcome": name, "error": text, "reason": ""} for name, text in ended.items()]
    entries = [{"guarantee": "G1", "status": "failed", "claims": [], "tests": tests}]
    suite = ElementTree.fromstring(render(Report({"date": "now"}, entries, ["a stale entry"]), "report.xml"))
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["6", "2", "1", "2"]
    assert [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None] == [
        "failed",
        "the run",
    ]
    assert suite.find("testcase/failure").text == "a driver's ?[31mred? <word>"


def raised_in(*files):
    """Return the message of an error through functions of these files, the last of which raises it."""
    call = {}.__getitem__
    for file in reversed(files):
        made = {"call": call, "name": "what is not there"}
        exec(compile("def run(name):\n    call(name)", file, "exec"), made)
        call = made["run"]
    with pytest.raises(KeyError) as raised:
        call("what is not there")
    error = raised.value
    error.__traceback__ = error.__traceback__.tb_next  # this function's own
    return message_of(error)


def test_an_error_in_the_kits_own_code_has_no_frames_of_pytest():
    """As of a property, which Hypothesis and pytest call: all frames are callers' of the plugin's code."""
    kit, pytests = "/x/hal_conformance/test_any.py", ["/x/_pytest/python.py", "/x/hypothesis/core.py", "/x/pluggy/a.py"]
    message = raised_in(*pytests, kit)
    assert f'File "{kit}"' in message
    assert not [name for name in pytests if name in message]
    vendors = raised_in(*pytests, kit, "/x/vendor.py")
    assert ("/x/vendor.py" in vendors, kit in vendors) == (True, False)


def test_cases_of_one_test_have_one_cause():
    def failed(case):
        try:
            raise AssertionError(f"{case}: counters() says 0 launches, but 2 reached the driver")
        except AssertionError as error:
            return cause_of(error, case)

    assert failed("on the device") == failed("a strided value")
