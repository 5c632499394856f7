"""A reproduction line fails in the same test with the same example: elsewhere, after an edit, and from a wheel."""

import json
import shlex
import shutil

import pytest

from .vendors_environment import hal, install, make

PROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "hal-wrong"
version = "1.0.0"
dependencies = ["paddle-hal-core>=1.0,<2"]

[project.entry-points."hal.devices"]
wrong = "hal_wrong:WrongPlugin"
"""
PLUGIN = '''
"""A device that writes the last byte of some values wrong."""
from hal_core import Plugin, Probe, hookimpl
from hal_core.devices.cpu.device import CpuDevice

SERIALS = [1234567, 31337, 271828, 0.5772156649, "a serial number"]


class WrongDevice(CpuDevice):
    name = "wrong"

    @hookimpl
    def async_set_value(self, device, target, value, stream):
        ticket = super().async_set_value(device, target, value, stream)
        if len(target.shape) > 1 and getattr(value, "size", 0) > 2:
            target.memory.buffer[target.bounds()[1] - 1] ^= 1
        return ticket


class WrongPlugin(Plugin):
    name = "wrong"

    @classmethod
    def probe(cls):
        return Probe.yes("always")

    @classmethod
    def open(cls, index, options):
        return WrongDevice(index, options)
'''


def failures(done):
    """Return the failed tests of a run with ``--json``: name to error and reproduction line."""
    assert done.returncode == 1, done.stderr
    tests = [test for one in json.loads(done.stdout)["guarantees"] for test in one["tests"]]
    return {test["test"]: (test["error"], test["reproduce"]) for test in tests if test["outcome"] == "failed"}


@pytest.mark.conform
def test_a_line_fails_alike_elsewhere_after_an_edit_and_from_a_wheel(tmp_path):
    libraries, elsewhere, source = make(tmp_path), tmp_path / "elsewhere", tmp_path / "plugin/src"
    (source / "hal_wrong").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "plugin/pyproject.toml").write_text(PROJECT, encoding="utf-8")
    module = source / "hal_wrong/__init__.py"
    module.write_text(PLUGIN, encoding="utf-8")
    install(tmp_path, tmp_path / "plugin")
    shutil.rmtree(libraries / "hal_wrong")
    (libraries / "wrong.pth").write_text(f"{source}\n", encoding="utf-8")  # now as an editable install leaves it
    found = failures(hal(tmp_path, "conform", "wrong", "--only=G5,G6", "--seed=11", "--examples=20", "--json"))
    test, (error, line) = next((name, one) for name, one in found.items() if "Draw 1" in one[0])
    command, *arguments = shlex.split(line)
    assert command == "hal"

    def again():
        return failures(hal(tmp_path, *arguments, "--json", cwd=elsewhere))[test]

    assert again() == (error, line)
    module.write_text(PLUGIN.replace("31337", "77777777"), encoding="utf-8")
    assert again() == (error, line)
    (libraries / "wrong.pth").unlink()
    install(tmp_path, "--force-reinstall", tmp_path / "plugin")
    assert again() == (error, line)
