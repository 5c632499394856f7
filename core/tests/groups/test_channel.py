"""The header of a slice and the groups of a job, with real groups; what ranks share is for the kit."""

from hal_core.ranks.channel import HEADER, MAGIC
from hal_core.slots.fields import HEADER_BYTES, StateConfig
from hal_core.slots.layout import lay_out

PLAIN = StateConfig(num_slots=4, max_model_len=16)


def test_g14_the_slice_begins_with_a_header_that_counts(pool, actions):
    seen = pool.run(actions.agree, [(0, 1)], (), PLAIN, 0, 3, ranks=[0, 1])
    begin = lay_out(PLAIN).groups["broadcast"].offset
    headers = [[HEADER.unpack(after[begin : begin + HEADER_BYTES]) for after in seen[r][1::2]] for r in (0, 1)]
    assert headers[0] == headers[1]
    assert [(h[0], h[2], h[4]) for h in headers[0]] == [(MAGIC, HEADER_BYTES, n) for n in (1, 2, 3)]


def test_g14_ranks_that_open_other_groups_are_named_on_all(pool, actions):
    answers = pool.run(actions.open_own, {0: [(0, 1)], 1: [(0, 1)], 2: [(0, 1)], 3: [(0, 1), (2, 3)]})
    for kind, text in answers.values():
        assert kind == "InvalidValue"
        assert "groups: rank 0 has '(0, 1)', rank 3 '(0, 1) (2, 3)'" in text


def test_g14_a_group_outside_the_job_is_refused_everywhere(pool, actions):
    answers = pool.run(actions.open_own, {key: [(0, 4)] for key in range(4)})
    assert all(kind == "InvalidValue" and "job of 4 ranks" in text for kind, text in answers.values())
