"""The kit, run in a separate process."""

import json
import os

import pytest

from .kit_reports import HANGS, HERE, RUN_MODULE, summary


@pytest.fixture
def conform(warm):
    """Run the command in a separate process; return its exit status and output."""

    def call(*arguments, code=None):
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        done = warm.run("hal_conformance", *arguments, code=RUN_MODULE, env=environment, timeout=HANGS)
        assert code is None or done.returncode == code, f"{summary(done.stdout)}\n{done.stderr[-4000:]}"
        return done

    return call


@pytest.fixture
def report(conform):
    """Run the kit with the profile quick; return its report as data.

    Few examples suffice, since these tests are about the report. The liars show that quick finds them, and ``make
    conform`` repeats these tests with the profile default.
    """

    def call(*arguments, code, examples=3):
        chosen = [f"--examples={examples}"] if examples else []
        return json.loads(conform(*arguments, "--json", "--profile=quick", *chosen, code=code).stdout)

    return call
