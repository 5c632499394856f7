"""``hal devices --open``: the output of opened devices, one that crashes, one that hangs."""

import errno
import os
import select
import tempfile

from hal.cli import opened
from hal.cli.opened import open_in_subprocess

from .device_listing import HEAVY, hal_command, rows_of
from .fixtures_plugins.builder import Site


def test_open_shows_capabilities_and_fallbacks_and_survives_a_crash(tmp_path):
    site = Site(tmp_path / "site")
    site.core()
    site.device("alpha", state="prints")
    site.device("crash", state="open_dies")
    site.device("fault", state="open_crashes")
    result = hal_command("devices", "--open", "--json", site=site, HAL_PLUGINS=",".join(site.modules))
    rows = rows_of(result, ("alpha", "crash", "fault"))
    opened = rows["alpha"]["opened"]
    assert opened["capabilities"]["fused_scatter"] is True
    assert opened["fallbacks"] == {"async_set_value": "a toy has no stream"}
    assert opened["seconds"] > 0
    assert opened["note"] == ""
    assert "ended with signal SIGSEGV" in rows["crash"]["opened"]["error"]
    assert (
        "fault: paddle-hal-fault 1.0: opening index 0 failed: OSError: driver said no"
        in rows["fault"]["opened"]["error"]
    )
    assert result.modules & HEAVY == set()


def test_open_as_text(tmp_path):
    site = Site(tmp_path / "site")
    site.core()
    site.device("alpha")
    site.device("beta", state="open_crashes")
    site.device("gamma", state="notes")
    result = hal_command("devices", "--open", site=site, HAL_PLUGINS=",".join(site.modules))
    assert result.returncode == 0, result.stderr
    assert "beta: not opened: beta: paddle-hal-beta 1.0: opening index 0 failed" in result.stdout
    assert "  fused_scatter: yes\n  pinned_host: no\n" in result.stdout
    assert "  collective: none\n" in result.stdout
    assert "  async_set_value falls back: a toy has no stream\n" in result.stdout
    assert result.stdout.count("  path: Python (as it was asked for)\n") == 1, "which path the cuda device takes"


def test_a_device_that_hangs_is_ended_with_all_it_has_started(tmp_path, monkeypatch):
    site = Site(tmp_path / "site")
    site.core()
    site.device("alpha", state="open_hangs")
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    mark = site.folder / "hung"  # the helper that the device starts; it inherits no descriptor that we wait for
    monkeypatch.setenv("HAL_TEST_MARK", str(mark))
    for seconds in (3, 10, 60):  # enough to reach the hang, on any machine
        result = open_in_subprocess("alpha", seconds)
        assert result == {"error": f"opening took longer than {seconds} s (raise --timeout, or see why it hangs)"}
        if mark.exists():
            break
    helper = int(mark.read_text())
    assert not alive(helper)


def test_what_was_made_for_it_is_taken_away_where_no_descriptor_is_left(tmp_path, monkeypatch):
    def none_left(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with opened._folder() as folder:
        for name in ("answer.json", "stderr"):
            (folder / name).touch()
        for name in ("open", "scandir"):
            monkeypatch.setattr(os, name, none_left)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def alive(process):
    """Whether the process is still there 10 seconds on; a killed one takes a moment to go."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return False
    with os.fdopen(handle) as waited:
        return not select.select([waited], [], [], 10)[0]
