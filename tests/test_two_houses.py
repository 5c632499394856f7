"""hal without its engine, and the names that the engine's modules had while they were hal's."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hal_engine":
            raise ModuleNotFoundError(f"No module named {name!r}", name="hal_engine")
sys.meta_path.insert(0, Missing())
from importlib import metadata
found = metadata.distributions
metadata.distributions = lambda **given: [one for one in found(**given) if one.name != "paddle-hal-engine"]
"""
CURE = "is of hal's engine, which is not installed (in a clone: pip install ./engine)"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ["run", "serve", "tail"])
def test_a_command_of_the_engine_says_what_to_install(command):
    done = run(f"{WITHOUT}\nfrom hal.cli import main\nmain([{command!r}])")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"hal: error: hal {command} {CURE}"


def test_hals_own_commands_need_no_engine():
    done = run(f"{WITHOUT}\nfrom hal.cli import main\nmain(['devices'])")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu" in done.stdout


@pytest.mark.parametrize("name", ["generate", "AsyncEngine", "Ranks", "OutputReader", "Worker"])
def test_a_name_of_the_engine_says_what_to_install(name):
    done = run(f"{WITHOUT}\nimport hal\nhal.{name}")
    assert f"hal_core.errors.Unavailable: hal.{name} {CURE}" in done.stderr


def test_a_former_module_says_what_to_install():
    done = run(f"{WITHOUT}\nimport hal.stepping")
    assert f"ImportError: hal.stepping {CURE}" in done.stderr


FORMER = ["engine", "stepping.runner", "transport.queued_sink", "proposers.ngram", "model.config", "worker", "reading"]


@pytest.mark.parametrize("module", FORMER)
def test_a_former_module_is_the_one_of_today(module):
    done = run(
        "import sys, importlib, warnings\n"
        f"with warnings.catch_warnings(record=True) as caught:\n"
        f"    warnings.simplefilter('always')\n"
        f"    former = importlib.import_module('hal.{module}')\n"
        f"today = importlib.import_module('hal_engine.{module}')\n"
        f"assert former is today and today.__spec__.name == today.__name__ == 'hal_engine.{module}'\n"
        f"assert sys.modules['hal.{module}'] is today\n"
        f"assert any('hal.{module} is hal_engine.{module} now' in str(one.message) for one in caught)\n"
    )
    assert done.stderr == ""
