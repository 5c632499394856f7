"""The chaos tests, short. Long: ``make soak``, ``make chaos`` and ``make fuzz`` (``episodes.py``)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long(23)


def test_g19_every_token_is_accounted_for_while_processes_are_killed():
    accounted(counts_of("--soak=300", "--seed=5", "--pause=0.2"))


@pytest.mark.steady
@pytest.mark.conform
def test_g19_every_token_is_accounted_for_where_frames_are_large():
    accounted(counts_of("--soak=250", "--seed=7", "--pause=0.2", "--large"))


def accounted(found):
    """The number of read records depends on the machine's load; only that it is not zero is required here."""
    assert found["records read"] > 20
    assert found["tokens read"] > 100
    assert found["preemptions read"] > 0
    assert found["kill reader"] >= 1
    assert found["kill worker"] >= 1


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_reader_stands_what_strangers_send(scheme):
    found = counts_of("--attacks=150", "--seed=3", f"--schemes={scheme}")
    assert found["attacks"] == 150
    assert found["tokens read"] > 0
    assert found["stretches skipped"] > 0


def test_g19_short_episodes_of_every_kind_lose_and_repeat_nothing():
    found = counts_of("--episodes=16", "--seed=3", "--ranks=0")
    assert found["tokens read"] > 50
    assert found["sessions"] >= 16
    assert all(found[f"episodes over {scheme}"] for scheme in ("ipc", "tcp"))


@pytest.mark.conform
def test_episodes_of_hal_run_answer_whole_or_report_the_loss():
    pytest.importorskip("paddle", reason="its launcher starts the ranks", exc_type=ImportError)
    found = counts_of("--episodes=8", "--seed=3", "--ranks=1", "--jobs=2")
    assert found["episodes of hal run"] == 8
    assert found["answers"] > 0


def counts_of(*options):
    """The counts of the episodes, from a separate process: its children are forks, and this one has threads."""
    command = [sys.executable, Path(__file__).with_name("episodes.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:-1]]
    return {name: int(number) for number, name in lines if number.isdigit()}
