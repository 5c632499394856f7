"""Installed plugins are found by metadata alone, and only the requested plugin is imported."""

import importlib.metadata
import re
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from hal_core.errors import InvalidValue, PluginError

import hal.discovery
from hal.device_list import devices
from hal.discovery import installed, load, probe

from .fixtures_plugins.builder import Site, only


@pytest.fixture
def site(empty_site):
    return empty_site


def test_listing_reads_metadata_and_imports_nothing(site):
    site.core(device=True)
    site.device("alpha", priority=100, version="2.5")
    site.device("beta", priority=None)
    assert [(entry.name, entry.who, entry.priority) for entry in installed()] == [
        ("alpha", "paddle-hal-alpha 2.5", 100),
        ("cpu", "paddle-hal-core 1.0.0", 0),
        ("beta", "paddle-hal-beta 1.0", -1),
    ]
    assert site.imported() == set()


def test_without_any_distribution_the_list_is_empty(site):
    assert installed() == ()


def test_load_imports_the_named_plugin_and_no_other(site):
    site.core(device=True)
    site.device("alpha")
    site.device("beta", state="exits")
    plugin = load(only("alpha"))
    assert plugin.name == "alpha"
    assert site.imported() == {"paddle-hal-alpha"}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("broken_import", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("syntax_error", "SyntaxError"),
        ("exits", "SystemExit: 3"),
        ("asserts", "AssertionError: half built"),
        ("no_class", "not a class derived from hal_core.Plugin"),
        ("no_base", "not a class derived from hal_core.Plugin"),
        ("abstract", "does not implement open"),
        ("other_name", "'somebody_else'"),
    ],
)
def test_a_broken_plugins_error_names_device_distribution_and_cure(site, state, says):
    site.core()
    site.device("alpha", state=state)
    with pytest.raises(PluginError, match=re.escape(says)) as caught:
        load(only("alpha"))
    text = str(caught.value)
    assert text.startswith("alpha: paddle-hal-alpha 1.0: ")
    assert "HAL_PLUGINS" in caught.value.cure


def test_an_entry_point_without_its_attribute_is_an_error(site):
    site.core()
    module = site.module("alpha")
    site.distribution("paddle-hal-alpha", points={"hal.devices": {"alpha": f"{module}:NoSuchClass"}})
    with pytest.raises(PluginError, match=r"paddle-hal-alpha 1\.0: importing .*NoSuchClass failed: AttributeError"):
        load(only("alpha"))


@pytest.mark.parametrize("text", ["high", "100", "priority_-1", "priority_1.5", "priority_" + "9" * 5000, "priority_²"])
def test_an_unreadable_priority_is_a_broken_plugin(site, text):
    site.core()
    site.device("alpha", priority=text)
    with pytest.raises(PluginError, match=r"hal\.priorities gives priority"):
        load(only("alpha"))
    assert site.imported() == set()


# The allow-list, shadowing, damage.


def allowed():
    return {entry.name for entry in installed() if entry.allowed}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, {"cpu", "alpha", "beta"}),
        ("", {"cpu"}),
        (" , ", {"cpu"}),
        ("paddle-hal-alpha", {"cpu", "alpha"}),
        ("Paddle_Hal.ALPHA, paddle-hal-beta,", {"cpu", "alpha", "beta"}),
        ("paddle-hal-core", {"cpu"}),
    ],
)
def test_the_allow_list_names_distributions_and_always_keeps_the_core(site, monkeypatch, text, names):
    site.core(device=True)
    site.device("alpha")
    site.device("beta")
    if text is not None:
        monkeypatch.setenv("HAL_PLUGINS", text)
    assert allowed() == names


def test_an_unknown_distribution_in_the_allow_list_is_an_error(site, monkeypatch):
    site.core(device=True)
    site.device("alpha")
    monkeypatch.setenv("HAL_PLUGINS", "paddle-hal-alhpa,paddle-hal-alpha")
    with pytest.raises(InvalidValue) as caught:
        installed()
    expected = (
        "HAL_PLUGINS: no installed plugin is called paddle-hal-alhpa; installed: paddle-hal-alpha, paddle-hal-core"
    )
    assert expected in str(caught.value)


def test_only_the_first_installation_of_a_distribution_counts(site, monkeypatch, tmp_path):
    site.core()
    site.device("alpha", version="2.0")
    older = Site(tmp_path / "older")
    older.device("alpha", version="1.0")
    older.device("old_name", distribution="paddle-hal-ALPHA", version="0.9")
    monkeypatch.setattr(sys, "path", [sys.path[0], str(older.folder), *sys.path[1:]])
    assert [entry.who for entry in installed()] == ["paddle-hal-alpha 2.0"]


def test_damaged_distributions_elsewhere_do_not_matter(site):
    site.core()
    site.device("alpha")
    (site.folder / "empty-1.0.dist-info").mkdir()
    broken = site.distribution("unrelated", points="[hal.devices_not]\nthis is = no [entry\nnonsense\n")
    (broken / "METADATA").write_bytes(b"\xff\xfe\x00")
    leftover = site.folder / "~addle_hal_gone-1.0.dist-info"
    leftover.mkdir()
    (leftover / "entry_points.txt").write_text("[hal.devices]\ngone = gone:Plugin\n")
    (site.folder / "file_not_folder-1.0.dist-info").write_text("")
    assert [entry.name for entry in installed()] == ["alpha"]


def test_a_plugin_with_damaged_entry_points_is_listed_as_broken(site):
    site.core()
    site.device("alpha")
    site.distribution("paddle-hal-bad", points="[hal.devices]\na line without an equals sign\n")
    bad = [entry for entry in installed() if entry.problem]
    assert [entry.distribution for entry in bad] == ["paddle-hal-bad"]
    with pytest.raises(PluginError, match=r"paddle-hal-bad 1\.0: its metadata cannot be read"):
        load(bad[0])
    assert {row.name: row.status for row in devices()} == {"alpha": "available", "?": "broken"}


# stevedore's cache.


def test_a_stale_stevedore_cache_is_passed_by(site, monkeypatch):
    """The disk cache still has the entry point from before a reinstallation."""
    import stevedore._cache

    site.core()
    old = site.module("alpha", "exits")
    new = site.device("alpha")
    stale = importlib.metadata.EntryPoint("alpha", f"{old}:ToyPlugin", "hal.devices")
    monkeypatch.setattr(stevedore._cache, "get_group_all", lambda namespace, path=None: [stale])
    assert load(only("alpha")).__module__ == new


def test_a_stevedore_that_loads_something_else_is_found_out(site, monkeypatch):
    import stevedore.driver

    site.core()
    old, new = site.module("alpha"), site.device("alpha")
    stale = importlib.metadata.EntryPoint("alpha", f"{old}:ToyPlugin", "hal.devices")

    class Later(stevedore.driver.DriverManager):
        def _load_plugins(self, *arguments):
            self.list_entry_points = lambda: [stale]
            return super()._load_plugins(*arguments)

    monkeypatch.setattr(stevedore.driver, "DriverManager", Later)
    with pytest.raises(PluginError, match=f"loaded {old}:ToyPlugin, the metadata says {new}:ToyPlugin") as caught:
        load(only("alpha"))
    assert "python-entrypoints" in caught.value.cure


def test_stevedore_is_named_in_one_file_only():
    folder = Path(hal.discovery.__file__).parent
    users = [
        path.name for path in folder.rglob("*.py") if re.search(r"(?m)^\s*(from|import) stevedore", path.read_text())
    ]
    assert users == ["discovery.py"]


# Probing and listing.


@pytest.mark.parametrize(
    ("state", "says"),
    [("probe_crashes", "OSError: probe fell over"), ("probe_exits", "SystemExit: 4"), ("probe_odd", "returned True")],
)
def test_a_probe_that_cannot_answer_is_a_broken_plugin(site, state, says):
    site.core()
    site.device("alpha", state=state)
    entry = only("alpha")
    with pytest.raises(PluginError, match=says):
        probe(entry, load(entry))


@pytest.mark.parametrize("state", ["available", "broken_import", "probe_crashes"])
def test_no_line_comes_of_a_plugin_whose_code_has_ended(site, monkeypatch, state):
    site.core()
    site.device("alpha", state=state)
    running, started = [], []

    class Timer:
        def __init__(self, seconds, call, arguments):
            self.daemon = False

        def start(self):
            started.append(self)
            running.append(self)

        def cancel(self):
            running.remove(self)

    monkeypatch.setattr(hal.discovery.threading, "Timer", Timer)
    entry = only("alpha")
    with nullcontext() if state == "available" else pytest.raises(PluginError):
        probe(entry, load(entry))
    assert len(started) == (1 if state == "broken_import" else 2)
    assert not running


@pytest.mark.parametrize(
    ("state", "what"), [("import_slow", "importing hal_fixture"), ("probe_slow", "probe() has run for 0.01 s")]
)
def test_a_line_names_a_plugin_whose_code_takes_long(site, monkeypatch, caplog, state, what):
    site.core()
    site.device("alpha", state=state)
    logged, lines = threading.Event(), []

    def emit(record):
        lines.append(record.getMessage())
        if what in lines[-1]:
            logged.set()

    monkeypatch.setattr(caplog.handler, "emit", emit)
    latch = SimpleNamespace(wait=lambda: logged.wait(60))  # the plugin's code ends once the line is there
    monkeypatch.setitem(sys.modules, "a_latch", latch)
    monkeypatch.setenv("HAL_SECONDS_PLUGIN_SLOW", "0.01")
    entry = only("alpha")
    probe(entry, load(entry))
    assert logged.is_set()
    assert all(line.startswith("alpha: paddle-hal-alpha 1.0: ") for line in lines)


def test_the_listing_shows_every_plugin_whatever_its_state(site, monkeypatch):
    site.core("1.0.0", device=True)
    site.device("fine", priority=50)
    site.device("away", state="unavailable", priority=40)
    site.device("gone", state="unavailable_raised", priority=39)
    site.device("broke", state="broken_import", priority=30)
    site.device("quits", state="exits", priority=29)
    site.device("late", requires=["paddle-hal-core>=2.0,<3"], priority=20)
    site.device("norange", requires=[], priority=19)
    site.device("twice", priority=15, distribution="paddle-hal-one")
    site.device("twice", priority=14, distribution="paddle-hal-two")
    site.device("sim", priority=None)
    site.device("left", priority=1)
    names = sorted(site.modules)
    names.remove("paddle-hal-left")
    monkeypatch.setenv("HAL_PLUGINS", ",".join(names))
    rows = devices()
    assert [(row.name, row.status, row.reason, row.cure) for row in rows if row.name != "broke"] == [
        ("fine", "available", "", ""),
        ("away", "unavailable", "no chip", "plug one in"),
        ("gone", "unavailable", "no driver", "install the driver"),
        (
            "quits",
            "broken",
            rows[4].reason,
            "paddle-hal-quits itself failed: mend it (-v shows its traceback), or leave it out with HAL_PLUGINS",
        ),
        (
            "late",
            "mismatch",
            "it is made for contract >=2.0,<3, installed is 1.0 (paddle-hal-core 1.0.0)",
            "install a paddle-hal-late made for contract 1.0, or a paddle-hal-core in >=2.0,<3",
        ),
        (
            "norange",
            "mismatch",
            "it names no contract range (contract 1.0 is installed)",
            "its metadata must say Requires-Dist: paddle-hal-core>=1.0,<2; then reinstall it",
        ),
        ("twice", "duplicate", rows[7].reason, rows[7].cure),
        ("twice", "duplicate", rows[7].reason, rows[7].cure),
        ("left", "excluded", "HAL_PLUGINS leaves it out", "add paddle-hal-left to HAL_PLUGINS"),
        ("cpu", "available", "", ""),
        ("sim", "available", "", ""),
    ]
    assert "paddle-hal-one 1.0" in rows[7].reason
    assert "paddle-hal-two 1.0" in rows[7].reason
    assert rows[4].reason.endswith("failed: SystemExit: 3")
    not_imported = {"paddle-hal-late", "paddle-hal-norange", "paddle-hal-one", "paddle-hal-two", "paddle-hal-left"}
    assert site.imported() == set(site.modules) - not_imported
    assert devices() == rows
