"""The kit, run in a process of its own."""

import json
import os

import pytest

from .kit_reports import HANGS, HERE, RUN_MODULE, said


@pytest.fixture
def conform(warm):
    """Run the command in a process of its own; its exit status and what it printed."""

    def call(*arguments, code=None):
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        done = warm.run("hal_conformance", *arguments, code=RUN_MODULE, env=environment, timeout=HANGS)
        assert code is None or done.returncode == code, f"{said(done.stdout)}\n{done.stderr[-4000:]}"
        return done

    return call


@pytest.fixture
def report(conform):
    """The same with the profile quick; its report as data.

    Few examples, since these tests are about what is reported: that quick finds liars is shown by the liars, and what
    passes here passes in ``make conform`` with the profile default.
    """

    def call(*arguments, code, examples=3):
        chosen = [f"--examples={examples}"] if examples else []
        return json.loads(conform(*arguments, "--json", "--profile=quick", *chosen, code=code).stdout)

    return call
