"""The kit is tested by liars: each must be killed by a test of its own guarantee, by assertion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hal_core.conformance.liars import everyone

LIARS = {liar.name: liar for liar in everyone()}
NEEDS_STREAMS = {"DoneEarly", "WaitsInside", "CountsOne", "CopiesWhileHeld", "NoGuard"}


def started(*arguments):
    command = [sys.executable, "-m", "hal_core.conformance", *arguments, "--liars", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def table_of(process):
    out, _ = process.communicate(timeout=290)
    table = json.loads(out)
    assert process.returncode == any(one["verdict"] not in ("killed", "skipped") for one in table)
    return {one["liar"]: one for one in table}


@pytest.fixture(scope="module")
def tables():
    """Both run at once: what they do most is wait."""
    processes = started("cpu"), started("--device-factory=queued_device:queued", "--only=G3,G10,G23,G28")
    try:
        yield [table_of(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def verdicts(tables):
    return tables[0]


@pytest.fixture(scope="module")
def verdicts_with_streams(tables):
    return tables[1]


@pytest.mark.parametrize("name", LIARS)
def test_every_liar_is_killed_by_a_test_of_its_guarantee(name, verdicts, verdicts_with_streams):
    verdict, number = verdicts[name], LIARS[name].guarantee
    if name in NEEDS_STREAMS:
        assert verdict["verdict"] == "skipped", verdict
        verdict = verdicts_with_streams[name]
    assert verdict["verdict"] == "killed", verdict
    assert verdict["by"].startswith(f"test_g{number:02d}_")


def test_there_are_liars_enough_and_their_stories_are_told():
    assert len(LIARS) >= 25
    assert all(liar.story for liar in LIARS.values())


def test_a_liar_that_lives_fails_the_command():
    code = (
        "import sys\n"
        "from hal_core.conformance import liars\n"
        "from hal_core.conformance.command import Options, run\n"
        "liars.everyone()\n"
        "liars.LIARS[:] = [liars.Liar('Honest', 25, 'it does not lie', type('Honest', (liars.Lie,), {}))]\n"
        "sys.exit(run(Options(device='cpu', liars=True)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "alive" in done.stdout
    assert "1 missed ['Honest']" in done.stdout
