"""``hal doctor``: one line for each broken plugin, the machine's limits, and a report without secrets."""

import json
from dataclasses import replace

import pytest

from hal.cli import doctor as doctor_command
from hal.cli import doctor_machine
from hal.cli.doctor import scrubbed
from hal.cli.opened import Ended
from hal.discovery import Entry, installed

from .device_listing import hal_command
from .fixtures_plugins.builder import Site

HOMES = "/" + "home"  # put together, as no file of the project names a path of one machine
BROKEN = {
    "broken_import": "importing hal_fixture",
    "exits": "SystemExit: 3",
    "exits_at_once": "the process ended with exit status 3 in its import",
    "probe_crashes": "probe() failed: OSError: probe fell over",
    "probe_exits": "probe() failed: SystemExit: 4",
    "open_crashes": "not opened: paddle-hal-{state} 1.0: opening index 0 failed: OSError: driver said no",
    "open_dies": "the process ended with signal SIGSEGV in its opening",
    "prints": "it prints when it is imported or probed",
    "close_crashes": "in its closing",
    "exit_crashes": "the process ended with signal SIGSEGV in its exit",
}


def doctor(site, *options, **extra):
    done = hal_command("doctor", "--json", *options, site=site, HAL_PLUGINS=",".join(site.modules), **extra)
    found = json.loads(done.stdout)
    assert done.returncode == bool(found["findings"]), done.stderr
    return found


@pytest.fixture
def site(tmp_path):
    """A folder of plugins for subprocesses."""
    site = Site(tmp_path / "site")
    site.core()
    return site


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """What is found where a plugin of each kind is installed."""
    site = Site(tmp_path_factory.mktemp("doctor") / "site")
    site.core()
    for state in BROKEN:
        site.device(state, state=state, priority=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # what is printed stays in a buffer first
        return doctor(site, HAL_DEVICE="cpu")


@pytest.mark.parametrize("state", BROKEN)
def test_a_broken_plugin_is_one_line(broken, state):
    (line,) = [one for one in broken["findings"] if one.startswith(f"{state}: ")]
    assert BROKEN[state].format(state=state) in line
    assert "\n" not in line
    (row,) = [one for one in broken["plugins"] if one["name"] == state]
    assert row["distribution"] == f"paddle-hal-{state} 1.0"


def test_a_plugin_that_hangs_is_one_line_and_ended(site):
    site.device("x", state="import_hangs", priority=None)
    found = doctor(site, "--timeout", "2", HAL_DEVICE="cpu")
    assert any(one.startswith("x: broken: its import did not end within 2 s") for one in found["findings"])


def test_a_plugin_whose_thread_keeps_its_process_is_a_finding(tmp_path, monkeypatch):
    answer = {"stage": "", "status": "available", "reason": "", "cure": ""}
    monkeypatch.setattr(
        doctor_command, "run_child", lambda *_: Ended({**answer}, timed_out=True, failed=True, how="", output="")
    )
    (entry,) = [one for one in installed() if one.name == "cpu"]
    row = doctor_command._plugin(entry, (entry,), step=False, seconds=30)
    assert row["status"] == "available"
    assert doctor_command._finding(row).startswith("cpu: its exit did not end within 30 s (a command would too: ")


def test_what_metadata_refuses_is_not_imported(site):
    site.device("old", requires=("paddle-hal-core>=0.1,<0.2",), priority=None)
    site.device("twice", distribution="paddle-hal-one")
    site.device("twice", distribution="paddle-hal-two")
    found = doctor(site)
    status = {row["name"]: row["status"] for row in found["plugins"]}
    assert (status["old"], status["twice"]) == ("mismatch", "duplicate")
    assert {"paddle-hal-old", "paddle-hal-one", "paddle-hal-two"}.isdisjoint(site.imported())
    assert found["selected"] is None
    assert "twice" in found["why"]


def test_metadata_that_cannot_be_read_is_broken_as_in_the_listing():
    entry = Entry("?", "mychip", "1.0", "", problem="its metadata cannot be read: OSError: gone")
    for entries in ((entry,), (entry, replace(entry, distribution="otherchip"))):
        row = doctor_command._plugin(entry, entries, False, 1.0)
        assert (row["status"], row["reason"]) == ("broken", entry.problem)


def test_an_unavailable_device_is_no_finding_and_is_passed_over(site):
    site.device("alpha", state="unavailable", priority=200)
    site.device("beta", state="available", priority=100)
    found = doctor(site)
    assert (found["selected"], found["why"]) == ("beta", "the best priority that can be used")
    assert any("alpha" in one and "no chip" in one for one in found["passed_over"])
    assert not [one for one in found["findings"] if one.startswith(("alpha", "beta"))]
    (beta,) = [row for row in found["plugins"] if row["name"] == "beta"]
    assert beta["opened"]["fallbacks"] == {"async_set_value": "a toy has no stream"}
    assert beta["locked"] == "not claimed"
    assert beta["import_seconds"] > 0


def test_a_step_names_the_hook_that_failed(site):
    site.device("toy", priority=None)  # its hooks have no effect
    found = doctor(site, "--step", HAL_DEVICE="toy")
    assert any(one.startswith("toy: ") for one in found["findings"]), found["findings"]


def test_one_step_of_each_hook_runs_on_the_cpu_and_the_text_says_so():
    done = hal_command("doctor", "--step", HAL_PLUGINS="")
    assert done.returncode == 0, done.stdout + done.stderr
    hooks = "insert_tasks sync, async_set_value sync, broadcast_tokens sync, update_inputs sync, save_output sync"
    assert f"  one step: {hooks}" in done.stdout
    assert "chosen without a name: cpu: the best priority that can be used" in done.stdout
    for fact in ("python: ", "paddle built for: ", "shared memory free: ", "descriptors: ", "compilers: "):
        assert f"\n{fact}" in done.stdout
    assert done.stdout.rstrip().endswith("no findings")


def test_the_report_has_no_secrets_and_no_output_of_plugins(site):
    module = site.device("x", state="probe_crashes", priority=None)
    path = site.folder / f"{module}.py"
    raised = f"raise OSError('{HOMES}/jane/driver.so needs ' + __import__('os').environ['MY_TOKEN'])"
    path.write_text(path.read_text().replace("raise OSError('probe fell over')", f"print('noise'); {raised}"))
    more = {"MY_TOKEN": "hush-hush-1", "MY_OTHER": "private-2", "HAL_DEVICE": "cpu"}
    plain = hal_command("doctor", site=site, HAL_PLUGINS=",".join(site.modules), **more).stdout
    assert "hush-hush-1" in plain
    report = hal_command("doctor", "--report", site=site, HAL_PLUGINS=",".join(site.modules), **more).stdout
    assert "~/driver.so needs ***" in report
    for hidden in ("hush-hush-1", "private-2", "jane", "noise"):
        assert hidden not in report
    assert "HAL_DEVICE=cpu" in report


def test_the_report_quotes_no_output_in_its_findings(site):
    module = site.device("x", state="exits_at_once", priority=None)
    path = site.folder / f"{module}.py"
    path.write_text(
        path.read_text().replace("import os; os._exit(3)", "import os; print('noise', flush=True); os._exit(3)")
    )
    plain, report = doctor(site, HAL_DEVICE="cpu"), doctor(site, "--report", HAL_DEVICE="cpu")
    assert any(one.endswith("; its output: noise") for one in plain["findings"])
    (line,) = [one for one in report["findings"] if one.startswith("x: ")]
    assert BROKEN["exits_at_once"] in line
    assert "noise" not in json.dumps(report)


def test_paths_of_users_are_scrubbed_everywhere(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdef")
    report = {"a": ["/" + "Users/jane/x", {"b": f"{HOMES}/joe: no"}], "n": 3, "k": "--key=abcdef"}
    assert scrubbed(report) == {"a": ["~/x", {"b": "~: no"}], "n": 3, "k": "--key=***"}


@pytest.mark.parametrize("name", ["DB_PASS", "PASSPHRASE", "MY_PASSWORD"])
def test_each_kind_of_secret_is_hidden(monkeypatch, name):
    monkeypatch.setenv(name, "hush-hush-1")
    assert scrubbed("needs hush-hush-1") == "needs ***"


def test_a_user_whose_name_begins_with_this_ones_is_hidden_entirely(monkeypatch):
    monkeypatch.setenv("HOME", f"{HOMES}/jo")
    assert scrubbed(f"{HOMES}/john/x and {HOMES}/jo/y") == "~/x and ~/y"
    monkeypatch.setenv("HOME", f"{HOMES}/group/jo")
    assert scrubbed(f"{HOMES}/group/jo/x") == "~/x"


def test_folders_with_the_users_name_are_hidden(monkeypatch):
    monkeypatch.setenv("LOGNAME", "jane")
    monkeypatch.delenv("USER", raising=False)
    assert scrubbed("/disks/jane/x /disks/janet/y /fast/jane: no") == "/disks/USER/x /disks/janet/y /fast/USER: no"


def test_small_limits_are_findings_with_cures():
    found = {"shared_memory_free": 1 << 20, "descriptors": 64}
    shared, descriptors = doctor_machine.findings(found)
    assert "shared memory has 1 MiB free, less than 16" in shared
    assert "--shm-size" in shared
    assert "64 descriptors a process are few (raise the limit: ulimit -n 256 or more)" in descriptors
    assert doctor_machine.findings({"shared_memory_free": None, "descriptors": -1}) == []
