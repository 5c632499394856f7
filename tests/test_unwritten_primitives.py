"""``hal run`` and ``hal serve`` on a device whose plugin has not written a primitive yet: one line."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from types import FunctionType

import httpx
import pytest
from hal_conformance import scaffold
from hal_core import PluginError, bind
from hal_core.devices.cpu.device import CpuDevice

from hal.unwritten import named_unwritten

from .finished_plugins import RUNTIME, finish
from .fixtures_plugins.builder import Site
from .serving.conftest import COMMAND, HANGS, serving

AT_OPENING = ("stream_create", "event_create", "allocate")
"""Primitives that the opening of the device calls."""
LATER_ON_RANKS = ("copy_out", "copy_in", "event_query")
"""In a step, at the start, and in a ticket, whose traceback has no device."""
LATER = ("stream_destroy", "stream_wait", "event_query", "free", "copy_in", "copy_out")

OF_RANKS = """
from hal_core.devices.cpu import CpuPlugin
from hal_core.devices.cpu.device import CpuDevice

class OurDevice(CpuDevice):
    name = "without_copy_out"

    def copy_out(self, memory, parts, stream):
        raise NotImplementedError

class OurPlugin(CpuPlugin):
    name = "without_copy_out"

    @classmethod
    def open(cls, index, options):
        return OurDevice(index, options)
"""


@pytest.fixture
def device(request, tmp_path, monkeypatch):
    """The name of an installed device of the async template, with one primitive not written."""
    yield from without(request.param, f"without_{request.param}", "async", tmp_path, monkeypatch)


@pytest.fixture
def sync_device(tmp_path, monkeypatch):
    """The name of one of the sync template whose memory, which is no part of hal's, has no ``_allocate``."""
    yield from without("_allocate", "without_memory", "sync", tmp_path, monkeypatch)


def without(primitive, name, kind, tmp_path, monkeypatch):
    """Install a device of a template with one primitive not written, and yield its name."""
    folder = tmp_path / "site"
    scaffold.make(name, kind, tmp_path / "made")
    shutil.copytree(tmp_path / f"made/src/hal_{name}", folder / f"hal_{name}")
    shutil.copy(RUNTIME, folder / "memory_runtime.py")
    code = folder / f"hal_{name}/device.py"
    head = re.search(rf"    def {primitive}\(.*\n", code.read_text()).group()
    finish(kind, folder / f"hal_{name}")
    code.write_text(code.read_text().replace(head, f"{head}        raise NotImplementedError\n"))
    plugin = re.search(r"class (\w+)\(Plugin\)", (folder / f"hal_{name}/__init__.py").read_text()).group(1)
    Site(folder).distribution(f"hal-{name}", points={"hal.devices": {name: f"hal_{name}:{plugin}"}})
    with installed(monkeypatch, folder, tmp_path):
        yield name


@pytest.fixture
def of_ranks(tmp_path, monkeypatch):
    """The name of an installed device with collectives, whose ``copy_out`` is not written."""
    name, folder = "without_copy_out", tmp_path / "site"
    Site(folder).distribution(f"hal-{name}", points={"hal.devices": {name: f"hal_{name}.device:OurPlugin"}})
    (package := folder / f"hal_{name}").mkdir()
    (package / "__init__.py").touch()
    (package / "device.py").write_text(OF_RANKS)
    with installed(monkeypatch, folder, tmp_path):
        yield name


@contextmanager
def installed(monkeypatch, folder, private):
    """Have this process and its children find the distributions of a folder."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private))
    yield
    for module in [one for one in sys.modules if one.startswith("hal_without_")]:
        del sys.modules[module]  # another test installs one of that name


@pytest.fixture
def run(command):
    """Run the command; return its one line."""

    def call(device, *options):
        done = command("run", "-q", "--device", device, "--prompt", "x", "--max-tokens", "2", *options)
        assert done.status == 2
        (line,) = [one for one in done.err.splitlines() if one]
        return line

    return call


def message(device, primitive=""):
    """The text of the error."""
    primitive = primitive or device.removeprefix("without_")
    cure = f"(write it in hal_{device}.device: docs/adding-a-device.md; hal conform {device} tries each primitive)"
    return f"{device}:0: its primitive {primitive} is not written {cure}"


@pytest.mark.parametrize("device", LATER, indirect=True)
def test_a_primitive_that_is_not_written_is_one_line(device, run):
    assert run(device) == f"hal: error: {message(device)}"


def test_a_primitive_of_the_plugins_own_class_is_one_line(sync_device, run):
    assert run(sync_device) == f"hal: error: {message(sync_device, '_allocate')}"


def test_a_checked_step_names_the_primitive(sync_device, command):
    done = command("doctor", "--step", "--json")
    assert done.status == 1
    (line,) = [one for one in json.loads(done.out)["findings"] if one.startswith(sync_device)]
    assert line == f"{sync_device}: one step failed: {message(sync_device, '_allocate')}"


def test_a_measurement_names_the_primitive(sync_device, command):
    done = command("bench", sync_device, "--rounds", "10")
    assert done.status == 2
    assert done.err.splitlines()[-1] == f"hal: error: {message(sync_device, '_allocate')}"
    assert "Traceback" not in done.err


@pytest.mark.parametrize("device", ["stream_destroy"], indirect=True)
def test_a_check_names_the_primitive_that_closing_needs(device, command):
    (line,) = [one for one in json.loads(command("doctor", "--json").out)["findings"] if one.startswith(device)]
    assert line == f"{device}: broken: {message(device).removeprefix(f'{device}:0: ')}"


@pytest.mark.conform
@pytest.mark.parametrize("device", LATER_ON_RANKS, indirect=True)
def test_a_split_worker_names_the_primitive(device, run):
    assert run(device, "--split", "1,1") == f"hal: error: {message(device)}"


@pytest.mark.conform
def test_a_rank_of_a_group_names_the_primitive(of_ranks, run):
    line = run(of_ranks, "--tp", "2")
    assert re.sub("rank [01]: ", "", line) == f"hal: error: {message(of_ranks)}"


@pytest.mark.conform
def test_a_rank_names_a_primitive_of_the_plugins_own_class(sync_device, run):
    line = run(sync_device, "--tp", "2")
    assert re.sub("rank [01]: ", "", line) == f"hal: error: {message(sync_device, '_allocate')}"


@pytest.mark.conform
def test_a_server_names_a_primitive_of_the_plugins_own_class(sync_device):
    refused_at_start(sync_device, message(sync_device, "_allocate"))


@pytest.mark.parametrize("device", ["copy_in"], indirect=True)
def test_a_server_that_cannot_start_names_the_primitive(device):
    refused_at_start(device, message(device))


def refused_at_start(device, error):
    """Start a server, which ends with one line."""
    command = [sys.executable, "-c", COMMAND, "serve", "--device", device, "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    _, line = ended.stderr.splitlines()
    assert line == f"hal: error: {error}"


@pytest.mark.parametrize("device", ["copy_out"], indirect=True)
def test_a_server_names_the_primitive_that_a_request_needs(device):
    with serving("--device", device) as served:
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=HANGS)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == message(device)
        assert served.process.stderr.readline() == f"hal: error: {message(device)}\n"


@pytest.mark.parametrize("device", AT_OPENING, indirect=True)
def test_a_primitive_that_the_opening_calls_is_named_too(device, run):
    line = run(device)
    assert f"opening index 0 failed: NotImplementedError: {device.removeprefix('without_')} (" in line
    assert line.startswith(f"hal: error: {device}: ")


def missing(*_):
    """A function of the plugin's module."""
    raise NotImplementedError


def library():
    """A function of another module that raises."""
    return FunctionType(missing.__code__, {"__name__": "a_library", "NotImplementedError": NotImplementedError})


@pytest.mark.parametrize("called", [missing, library()])
def test_what_a_library_of_the_plugin_has_not_written_is_no_primitive(called):
    class OurDevice(CpuDevice):
        def allocate(self, nbytes):
            return called(nbytes)

    device = OurDevice(0, {})
    with bind(device) as bound, pytest.raises((PluginError, NotImplementedError)) as raised, named_unwritten(bound):
        device.allocate(1)
    assert isinstance(raised.value, PluginError) == (called is missing)
    assert called is not missing or f"its primitive missing is not written (write it in {__name__}: " in str(
        raised.value
    )


def test_what_another_part_has_not_written_is_no_primitive():
    with bind(CpuDevice(0, {})) as bound, pytest.raises(NotImplementedError), named_unwritten(bound):
        raise NotImplementedError("a runner's")
