"""broadcast_tokens on the sim device: two ranks over shared memory, a lost and a hung one (G13 to G16)."""

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
from hal_conformance.ranks.processes import RankPool
from hal_core.slots.fields import StateConfig

PLAIN = StateConfig(num_slots=4, max_model_len=16)
SPECULATIVE = StateConfig(num_slots=3, max_model_len=16, max_draft_tokens=2)


def _actions():
    spec = importlib.util.spec_from_file_location("hal_sim_actions", Path(__file__).with_name("group_actions.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


actions = _actions()


def environment(rank, endpoints):
    return {"PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints)}


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, environment=environment) as ranks:
        yield ranks


@pytest.mark.parametrize("mode", ["eager", "worker", "lazy"])
@pytest.mark.parametrize("sizes", [PLAIN, SPECULATIVE], ids=["plain", "speculative"])
def test_g13_g14_both_ranks_hold_the_source_s_bytes_after_one_collective(pool, mode, sizes):
    for wrong, counts, races, paddle in pool.run(actions.agree, mode, sizes, 3).values():
        assert wrong == []
        assert counts == [1, 1, 1], "one collective a call"
        assert races == []
        assert not paddle, "Paddle is not needed"


@pytest.mark.parametrize("mode", ["worker", "lazy"])
def test_a_closing_rank_waits_for_its_broadcast_to_reach_all(pool, mode, tmp_path):
    """A rank that is stopped with its last step in flight left the group in the middle of its collective."""
    answers = pool.run(actions.close_under_way, mode, str(tmp_path))
    assert {rank: answer[:2] for rank, answer in answers.items()} == {0: (None, None), 1: (None, None)}
    assert not answers[1][2], "the broadcast of rank 1 waits for rank 0's"


def check_lost(answer, limit):
    assert answer is not None, "the survivor never met an error"
    (name, text), took, (again, _), took_again, written = answer
    assert name == again == "GroupLost"
    assert text.startswith("sim:0: broadcast_tokens: group: the group of rank 0 is lost: ")
    assert "start them again" in text
    assert took < limit
    assert took_again < 1.0, "a dead group answers at once"
    assert written is None, "the device goes on"


def test_g16_a_group_with_a_missing_rank_waits_only_once():
    """The rank is lost before it joins: the first error is the timeout's, and no later call waits again."""
    with RankPool(2, environment=environment) as ranks:
        ranks.signal(1, signal.SIGKILL)
        answer = ranks.run(actions.go_on, 60.0, ranks=[0], timeout=60.0)[0]
    check_lost(answer, 8.0)
    assert "rank(s) 1 did not come within 2000 ms" in answer[0][1]
    assert "rank(s) 1 did not come within 2000 ms" in answer[2][1], "later errors say the same"
