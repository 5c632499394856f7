"""`paddle.distributed` over the simulated collectives, two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hal_core.devices import HeldPort
from hal_sim import Mode, NoPaddle, paddle_env
from hal_sim.build import installed_paddle

SCRIPT = str(Path(__file__).parent / "paddle_rank.py")
try:
    installed_paddle()
except NoPaddle as missing:
    pytestmark = pytest.mark.skip(reason=str(missing))


def run_ranks(name: str, **options: int) -> list[tuple[int, Any, str]]:
    with contextlib.ExitStack() as stack:
        master, *ports = [f"127.0.0.1:{stack.enter_context(HeldPort()).number}" for _ in range(3)]
        return run_on(name, master, ports, options)


def run_on(name: str, master: str, ports: list[str], options: dict[str, int]) -> list[tuple[int, Any, str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, name],
            env=os.environ | paddle_env.distributed(rank, ports, master, **options),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=90)
            answers = [line for line in out.splitlines() if line.startswith("{")]
            results.append((process.returncode, json.loads(answers[-1]) if answers else None, err))
    finally:
        for process in processes:
            process.kill()  # a rank that hangs must not outlive the test
    return results


@pytest.mark.steady
@pytest.mark.conform
def test_the_collectives_under_paddle():
    for rank, (code, got, err) in enumerate(run_ranks("collectives", mode=2)):
        assert code == 0, err
        assert got["broadcast"] == [2.0] * 4
        assert got["address kept"]
        assert got["all_reduce"] == [3] * 3
        assert got["reduce"] == ([3.0] if rank == 0 else got["reduce"])
        assert got["all_gather"] == [1.0, 2.0]
        assert got["reduce_scatter"] == [2.0 * rank]
        assert got["received"] == [7.0] * 2
        assert got["group"] == [1]
        assert got["submissions"]["broadcast"] >= 1
        assert got["races"] == []


@pytest.mark.conform
def test_a_lost_peer_is_an_error_of_the_survivor():
    (code, got, err), (killed, _, _) = run_ranks("lost", collective_timeout_ms=5000)
    assert killed == -signal.SIGKILL
    assert code == 0, err
    assert got["seconds"] < 10
    assert all("error code" in message for message in got["messages"]), got
    assert "rank 1" in err
    assert "is dead" in err


@pytest.mark.conform
def test_the_checker_finds_paddles_own_race_in_all_gather():
    """In the eager mode too, whose bytes come out right by luck. Races of ours are in ``test_races.py``."""
    for code, got, err in run_ranks("gather_list", mode=Mode.EAGER):
        assert code == 0, err
        assert got["right"]
        assert any("all_gather" in race and "copy_d2d" in race for race in got["races"]), got
