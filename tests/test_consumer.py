"""tests/consumer.py, a user's program: it runs, and pyright takes it (mypy does so in `make lint`)."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONSUMER = Path(__file__).with_name("consumer.py")


def test_the_consumer_runs():
    assert runpy.run_path(str(CONSUMER))["worker"]()[:2] == [1, 2]


def test_pyright_takes_the_consumer():
    if (pyright := shutil.which("pyright")) is None:
        pytest.skip("pyright is not installed")
    command = [pyright, "--outputjson", "--pythonpath", sys.executable, str(CONSUMER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["generalDiagnostics"] == []
