"""The chaos test, short. Long: ``make soak``, which is ``python tests/output/chaos.py --steps 10000``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("chaos", Path(__file__).with_name("chaos.py"))
chaos = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chaos)


@pytest.mark.timeout(180)
def test_g19_every_token_is_accounted_for_while_reader_and_worker_are_stopped_and_killed():
    accounted(chaos.run(steps=500, seed=5, pause=0.2, timeout=150))


@pytest.mark.timeout(180)
def test_g19_every_token_is_accounted_for_where_frames_go_in_pieces():
    accounted(chaos.run(steps=400, seed=7, pause=0.2, timeout=150, large=True))


@pytest.mark.timeout(180)
@pytest.mark.skipif(
    importlib.util.find_spec("iceoryx2") is None, reason="needs iceoryx2: pip install 'paddle-hal[shm]'"
)
def test_g19_every_token_is_accounted_for_where_frames_lie_in_shared_memory_and_nothing_is_left_there():
    found = chaos.run(steps=400, seed=5, pause=0.2, timeout=150, scheme="shm")
    accounted(found)
    assert found["frames in shared memory"] > 20
    assert found["domains of shared memory"] > 1


def accounted(found):
    assert found["records read"] > 200
    assert found["tokens read"] > 1000
    assert found["preemptions read"] > 20
    assert found["kill_reader"] >= 1
    assert found["kill_worker"] >= 1
