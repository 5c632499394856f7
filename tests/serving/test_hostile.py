"""Hostile clients keep no other client waiting: the attacks of `hostile.py`."""

import pytest

from .hostile import ATTACKS, judge, judge_a_stopped_engine

pytestmark = pytest.mark.conform


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_harms_nobody_else(name):
    print(judge(name))


def test_a_stopped_engine_process_keeps_nobody_waiting():
    print(judge_a_stopped_engine())
