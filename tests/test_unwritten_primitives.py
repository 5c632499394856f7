"""``hal run`` on a device whose plugin has not written a primitive yet: one line."""

from __future__ import annotations

import re
import shutil

import pytest
from hal_conformance import scaffold
from hal_core import bind
from hal_core.devices.cpu.device import CpuDevice

from hal.cli import main
from hal.unwritten import named_unwritten

from .finished_plugins import RUNTIME, finish
from .fixtures_plugins.builder import Site

AT_OPENING = ("stream_create", "allocate")
"""Primitives that the opening of the device calls."""
LATER = ("stream_destroy", "stream_wait", "event_create", "event_query", "free", "copy_in", "copy_out")


@pytest.fixture
def device(request, tmp_path, monkeypatch):
    """The name of an installed device of the async template, with one primitive not written."""
    name, folder = f"without_{request.param}", tmp_path / "site"
    scaffold.make(name, "async", tmp_path / "made")
    shutil.copytree(tmp_path / f"made/src/hal_{name}", folder / f"hal_{name}")
    shutil.copy(RUNTIME, folder / "memory_runtime.py")
    code = folder / f"hal_{name}/device.py"
    head = re.search(rf"    def {request.param}\(.*\n", code.read_text()).group()
    finish("async", folder / f"hal_{name}")
    code.write_text(code.read_text().replace(head, f"{head}        raise NotImplementedError\n"))
    plugin = re.search(r"class (\w+)\(Plugin\)", (folder / f"hal_{name}/__init__.py").read_text()).group(1)
    Site(folder).distribution(f"hal-{name}", points={"hal.devices": {name: f"hal_{name}:{plugin}"}})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return name


def run(device, capsys):
    """Run the command; return its one line."""
    with pytest.raises(SystemExit) as end:
        main(["run", "-q", "--device", device, "--prompt", "x", "--max-tokens", "2"])
    assert end.value.code == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one]
    return line


@pytest.mark.parametrize("device", LATER, indirect=True)
def test_a_primitive_that_is_not_written_is_one_line(device, capsys):
    cure = f"(write it in hal_{device}.device: docs/adding-a-device.md; hal conform {device} tries each primitive)"
    primitive = device.removeprefix("without_")
    assert run(device, capsys) == f"hal: error: {device}:0: its primitive {primitive} is not written {cure}"


@pytest.mark.parametrize("device", AT_OPENING, indirect=True)
def test_a_primitive_that_the_opening_calls_is_named_too(device, capsys):
    line = run(device, capsys)
    assert f"opening index 0 failed: NotImplementedError: {device.removeprefix('without_')} (" in line
    assert line.startswith(f"hal: error: {device}: ")


def test_what_another_part_has_not_written_is_no_primitive():
    with bind(CpuDevice(0, {})) as bound, pytest.raises(NotImplementedError), named_unwritten(bound):
        raise NotImplementedError("a runner's")
