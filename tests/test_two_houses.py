"""hal without its engine, and the names that the engine's modules had while they were hal's."""

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


FORMER = {
    **{
        name: f"hal_engine.{name}" for name in ("engine", "stepping.runner", "transport.queued_sink", "proposers.ngram")
    },
    **{name: f"hal_engine.{name}" for name in ("proposers.ngram", "model.config", "model", "reading")},
    "worker": "hal_paddle_runner",
    "worker.runner": "hal_paddle_runner.runner",
    "model.batch": "hal_paddle_runner.batch",
    "proposers.mtp": "hal_paddle_runner.mtp",
}


@pytest.mark.parametrize(("module", "now"), FORMER.items())
def test_a_former_module_is_the_one_of_today(module, now):
    done = run(
        "import sys, importlib, warnings\n"
        f"with warnings.catch_warnings(record=True) as caught:\n"
        f"    warnings.simplefilter('always')\n"
        f"    former = importlib.import_module('hal.{module}')\n"
        f"today = importlib.import_module({now!r})\n"
        f"assert former is today and today.__spec__.name == today.__name__ == {now!r}\n"
        f"assert sys.modules['hal.{module}'] is today\n"
        f"assert any('hal.{module} is {now} now' in str(one.message) for one in caught)\n"
    )
    assert done.stderr == ""


def test_the_names_of_a_former_module_are_there():
    done = run("import warnings; warnings.simplefilter('ignore'); from hal.worker import ModelRunner, Worker")
    assert done.stderr == ""
