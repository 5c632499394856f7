"""Groups of processes over shared memory: right answers, and an error on every survivor when a peer is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hal_core.errors import GroupLost, InvalidValue
from hal_sim import Group, new_group_name, options

RANK = str(Path(__file__).parent / "rank.py")
SEGMENTS = Path("/dev/shm")


def run_ranks(name: str, ranks: int) -> list[tuple[int, Any]]:
    """Exit code and answer of each rank."""
    group = new_group_name()
    processes = [
        subprocess.Popen(
            [sys.executable, RANK, name, group, str(ranks), str(r)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(ranks)
    ]  # fmt: skip
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=60)
            assert process.returncode in (0, -signal.SIGKILL), err
            results.append((process.returncode, json.loads(out) if out else None))
    finally:
        for process in processes:
            process.kill()  # a rank that hangs must not outlive the test
    assert not (SEGMENTS / group[1:]).exists(), "nothing is left in shared memory"
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective(ranks):
    mine = [np.arange(5) + 10 * r for r in range(ranks)]
    total = sum(mine)
    for rank, (code, got) in enumerate(run_ranks("collectives", ranks)):
        assert code == 0
        assert got["broadcast"] == mine[1].tolist()
        assert got["sum"] == total.tolist()
        assert got["largest"] == mine[-1].tolist()
        assert got["average"] == pytest.approx((total / ranks).tolist(), rel=1e-3)
        assert got["reduce"] == (total.tolist() if rank == 1 else [0] * 5)
        assert got["gather"] == np.concatenate(mine).tolist()
        assert got["scatter"] == [ranks * 2 * rank, ranks * (2 * rank + 1)]
        assert got["large"] == [ranks * (ranks + 1) / 2]
        assert got["empty"] == got["barrier"] == []
        assert got.get("received", True)


def test_a_killed_peer_is_noticed_by_all_long_before_the_timeout():
    *survivors, (killed, nothing) = run_ranks("lost", 3)
    assert (killed, nothing) == (-signal.SIGKILL, None)
    for code, (first, second) in survivors:
        assert code == 0
        seconds, message = first.split(" ", 1)
        assert float(seconds) < 5
        assert message.startswith("GroupLost")
        assert "rank 2" in message
        assert "is dead" in message
        assert "GroupLost" in second, "the group stays dead"


def test_a_peer_that_left_is_noticed():
    *survivors, _ = run_ranks("left", 2)
    for _, (message,) in survivors:
        assert "GroupLost" in message
        assert "rank 1 has left the group" in message


def test_a_hung_peer_ends_every_wait_within_the_timeout_its_own_too():
    results = run_ranks("hung", 3)
    for _, (line,) in results:
        seconds, text = line.split(" ", 1)
        assert float(seconds) < 6
        assert text.startswith("GroupLost"), text
    assert any("no answer from a peer within 1500 ms" in line for _, (line,) in results)


def test_ranks_that_call_different_collectives_are_reported():
    for _, message in run_ranks("disagree", 2):
        assert "GroupLost" in message
        assert "call different collectives" in message
        assert "broadcast" in message
        assert "all_reduce" in message


def test_a_peer_that_never_joins_ends_in_an_error():
    name = new_group_name()
    with (
        options(collective_timeout_ms=50),
        pytest.raises(GroupLost, match=r"joining the group: rank\(s\) 1 did not come within 50 ms"),
    ):
        Group(name, 2, 0)
    assert not (SEGMENTS / name[1:]).exists()


def test_a_rank_outside_the_group_is_refused():
    with pytest.raises(InvalidValue, match="rank 2 of 2"):
        Group("/halsim_none", 2, 2)


def test_segments_of_killed_processes_are_swept():
    stale = SEGMENTS / "halsim_4194304_1_feedfeed"  # above the largest process number, so no such process is
    other = SEGMENTS / f"halsim_of_somebody_else_{os.getpid()}"
    stale.write_bytes(b"")
    other.write_bytes(b"")
    try:
        new_group_name()
        assert not stale.exists()
        assert other.exists()
    finally:
        other.unlink()
