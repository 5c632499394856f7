"""G16 with real groups: lost and hung ranks. G17 and G18 with real groups: only the sender sends, every rank cleans
up.
"""

from hal_core.slots.fields import StateConfig

TIMEOUT = 2.0
GENEROUS = 10.0
PLAIN = StateConfig(num_slots=4, max_model_len=16)


def check_lost(answers, rank=None):
    for survivor, answer in answers.items():
        assert answer is not None, f"rank {survivor} never met an error"
        text, took, again, took_again = answer
        assert "is lost" in text
        assert "start them again" in text
        assert rank is None or f"rank {rank}" in text or f"[{rank}]" in text, text
        assert took < TIMEOUT + GENEROUS
        assert again is not None
        assert again[0] == "GroupLost"
        assert took_again < TIMEOUT, "a dead group answers at once"


def test_g16_a_missing_rank_is_named_and_the_other_group_continues(pool, actions):
    pool.begin(actions.hang_on, (2, 3), ranks=[2])
    pool.run(actions.agree, [(0, 1)], (), PLAIN, 3, 20, ranks=[0, 1])
    answers = pool.finish([2])
    check_lost(answers, 3)
    assert "did not come" in answers[2][0]


def test_g16_a_group_that_was_lost_is_opened_anew_by_all_ranks(pool, actions):
    """The pool's fixture reopens the groups that the previous test lost."""
    pool.run(actions.agree, [(2, 3), (0, 1)], (), PLAIN, 4, 3)


def test_g16_closing_says_goodbye_and_leaves_no_thread(ranks, pool, actions):
    assert all(left == [] for left in pool.run(actions.leave).values())
    ranks.open()
