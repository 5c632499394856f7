"""``hal devices`` and ``hal --version``: their output, imports and failures."""

import json
import os
import pty
import subprocess
import sys
from importlib import metadata

import pytest

import hal
from hal.cli import main

from .device_listing import HEAVY, environment, hal_command, rows_of
from .fixtures_plugins.builder import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Installed for subprocesses: on their path before the real site-packages, whose core it shadows."""
    site = Site(tmp_path_factory.mktemp("cli") / "site")
    site.core("1.1.0", device=True)
    site.device("alpha", priority=30, state="prints")
    site.device("beta", priority=20, state="broken_import")
    site.device("gamma", priority=10, state="unavailable")
    site.device("late", requires=["paddle-hal-core>=9.0,<10"], priority=None)
    return site


def test_the_table_on_a_pipe_has_one_plain_line_for_each_device(site):
    result = hal_command("devices", site=site)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert lines["device"].split() == ["device", "distribution", "contract", "priority", "status"]
    assert lines["alpha"].split() == ["alpha", "paddle-hal-alpha", "1.0", ">=1.0,<2", "ok", "30", "available"]
    assert "broken: importing" in lines["beta"]
    assert "a_module_that_nobody_has" in lines["beta"]
    assert lines["gamma"].endswith("unavailable: no chip (plug one in)")
    assert ">=9.0,<10 no" in lines["late"]
    assert "by name only" in lines["late"]
    assert "embedded ok" in lines["cpu"]
    assert result.stdout.endswith("selected without a name: alpha\n")
    assert hal_command("devices", site=site).stdout == result.stdout


def test_json_is_one_object_whatever_a_plugin_prints(site):
    result = hal_command("devices", "--json", site=site)
    assert (result.returncode, "noise of a plugin" in result.stderr) == (0, True)
    report = json.loads(result.stdout)
    assert (report["contract"], report["selected"], report["why"]) == ("1.1", "alpha", "")
    rows = rows_of(result)
    assert {name: row["status"] for name, row in rows.items()} == {
        "alpha": "available",
        "beta": "broken",
        "gamma": "unavailable",
        "late": "mismatch",
        "cpu": "available",
    }
    assert rows["gamma"] == {
        "name": "gamma",
        "distribution": "paddle-hal-gamma",
        "version": "1.0",
        "contract": ">=1.0,<2",
        "priority": 10,
        "status": "unavailable",
        "reason": "no chip",
        "cure": "plug one in",
        "opened": None,
    }


def test_a_plugin_that_failed_by_itself_shows_its_traceback_on_request(site):
    plain, verbose = (hal_command("devices", *more, site=site) for more in ((), ("-v",)))
    assert "Traceback" not in plain.stdout
    assert "reinstall" not in plain.stdout
    assert "(paddle-hal-beta itself failed: mend it (-v shows its traceback), or leave it out" in plain.stdout
    assert "\n\nbeta: Traceback (most recent call last):\n" in verbose.stdout
    assert "import a_module_that_nobody_has\n" in verbose.stdout
    found = json.loads(hal_command("devices", "--json", "--verbose", site=site).stdout)
    assert ["Traceback" in row["trace"] for row in found["devices"] if row["name"] in ("alpha", "beta")] == [
        False,
        True,
    ]


@pytest.mark.parametrize("option", [(), ("-v",)])
def test_hal_run_shows_the_traceback_of_a_plugin_that_failed_on_request(site, option):
    result = hal_command("run", "--prompt", "x", "--device", "beta", *option, site=site)
    *trace, line = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert line.startswith("hal: error: beta: paddle-hal-beta 1.0: importing")
    assert "reinstall" not in line
    assert ("Traceback (most recent call last):" in trace) == bool(option)
    assert any("import a_module_that_nobody_has" in each for each in trace) == bool(option)


def test_the_listing_says_why_nothing_would_be_selected(site):
    report = json.loads(hal_command("devices", "--json", site=site, HAL_DEVICE="beta").stdout)
    assert report["selected"] is None
    assert report["why"].startswith("beta: paddle-hal-beta 1.0: importing")
    result = hal_command("devices", site=site, HAL_DEVICE="alpha:3")
    assert "selected without a name: alpha:3" in result.stdout


@pytest.mark.parametrize("arguments", [("devices",), ("devices", "--json"), ("--version",), ("--help",)])
def test_no_listing_imports_numpy_or_a_framework(arguments):
    """With the devices that are installed, the embedded one included."""
    result = hal_command(*arguments)
    assert result.returncode == 0, result.stderr
    assert result.modules & HEAVY == set()
    assert {name for name in result.modules if name.startswith("hal.")} & {
        "hal_engine.cli.run",
        "hal_paddle_runner",
        "hal.reader",
    } == set()


def test_import_hal_imports_next_to_nothing():
    code = "import sys; before = set(sys.modules); import hal; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    loaded = set(done.stdout.split())
    assert not loaded & (HEAVY | {"importlib.metadata", "stevedore", "hal_core", "pluggy", "typer", "rich"})


def test_version_names_hal_contract_python_and_paddle():
    result = hal_command("--version")
    first, second, third, fourth = result.stdout.splitlines()
    assert first == f"hal {hal.__version__}"
    core = metadata.version("paddle-hal-core")
    assert second == f"contract {core.rpartition('.')[0]} (paddle-hal-core {core})"
    assert third == "python " + ".".join(map(str, sys.version_info[:3]))
    assert fourth.startswith("paddle ")
    assert "paddle" not in result.modules


def test_version_shows_every_build_of_paddle_or_none(tmp_path, monkeypatch, capsys):
    site = Site(tmp_path / "site").activate(monkeypatch)
    site.core("1.0.4")
    assert version_line(capsys) == "paddle not installed"
    site.distribution("paddlepaddle", version="3.3.1", points="")
    site.distribution("PaddlePaddle_gpu", version="3.2.0", points="")
    assert version_line(capsys) == "paddle 3.2.0 (PaddlePaddle_gpu), 3.3.1 (paddlepaddle)"


def version_line(capsys):
    return listing(capsys, ["--version"]).splitlines()[-1]


@pytest.mark.parametrize("arguments", [["devices"], ["devices", "--json"]])
def test_without_any_plugin_the_listing_is_empty_and_well(tmp_path, monkeypatch, capsys, arguments):
    listing(capsys, arguments)  # with the installed devices: imports the command line's requirements
    Site(tmp_path / "site").activate(monkeypatch).core()
    for _ in range(2):
        out = listing(capsys, arguments)
        if "--json" in arguments:
            report = json.loads(out)
            assert (report["devices"], report["selected"]) == ([], None)
            assert "no device is installed" in report["why"]
        else:
            assert "no device is installed (reinstall paddle-hal-core: pip install ./core" in out


def listing(capsys, arguments):
    main(arguments)
    return capsys.readouterr().out


def test_an_error_of_ours_is_one_line_on_stderr_and_exit_status_2(site):
    result = hal_command("devices", site=site, HAL_PLUGINS="paddle-hal-nothing")
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("hal: error: HAL_PLUGINS: no installed plugin is called paddle-hal-nothing; installed: ")


def test_completion_knows_the_commands_and_their_options():
    for words, found in (("hal dev", "devices"), ("hal devices --o", "--open")):
        more = {"_HAL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        command = [sys.executable, "-m", "hal"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(**more), check=False)
        assert found in done.stdout.split(), done.stderr


def test_a_reason_in_another_script_does_not_break_an_ascii_terminal(tmp_path):
    site = Site(tmp_path / "site")
    site.core()
    module = site.device("alpha", state="unavailable")
    path = site.folder / f"{module}.py"
    path.write_text(path.read_text(encoding="utf-8").replace("no chip", "没有芯片 [red]"), encoding="utf-8")
    result = hal_command("devices", site=site, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert "\\u6ca1\\u6709\\u82af\\u7247 [red] (plug one in)" in result.stdout


def test_a_terminal_gets_colour(site):
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", "from hal.cli import main; main()", "devices"]
    settings = environment(site, TERM="xterm", COLUMNS="100")
    settings.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, env=settings) as child:
        os.close(follower)
        shown = b""
        while chunk := read_terminal(leader):
            shown += chunk
    os.close(leader)
    assert child.returncode == 0
    assert b"\x1b[32mavailable" in shown


def read_terminal(leader):
    try:
        return os.read(leader, 65536)
    except OSError:  # Linux's error for a closed other end
        return b""
