"""G13 to G15 with real groups: equality byte for byte, terms, headers."""

import pytest
from hal_core.ranks.channel import HEADER, MAGIC
from hal_core.slots.fields import HEADER_BYTES, StateConfig
from hal_core.slots.layout import lay_out

PLAIN, SPECULATIVE = (
    StateConfig(num_slots=4, max_model_len=16),
    StateConfig(num_slots=4, max_model_len=16, max_draft_tokens=2),
)


def test_g14_the_slice_begins_with_a_header_that_counts(pool, actions):
    seen = pool.run(actions.agree, [(0, 1)], (), PLAIN, 0, 3, ranks=[0, 1])
    begin = lay_out(PLAIN).groups["broadcast"].offset
    headers = [[HEADER.unpack(after[begin : begin + HEADER_BYTES]) for after in seen[r][1::2]] for r in (0, 1)]
    assert headers[0] == headers[1]
    assert [(h[0], h[2], h[4]) for h in headers[0]] == [(MAGIC, HEADER_BYTES, n) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sizes": StateConfig(num_slots=5, max_model_len=16)}, "sizes: rank 0 has 'num_slots=4"),
        ({"sizes": StateConfig(num_slots=4, max_model_len=4096)}, "max_model_len=4096"),
        ({"sizes": SPECULATIVE}, "rank 0 has 'sampled_token_ids', rank 1 'sampled_token_ids accept_tokens"),
        ({"swap": ("accept_num", "step_idx")}, "slot table"),
        ({"swap": ("seed", "min_p")}, "slot table"),
        ({"reset": "step_idx"}, "slot table"),
        ({"name": "mtp"}, "state: rank 0 has 'target', rank 1 'mtp'"),
        ({"ranks": (1, 0)}, "source: rank 0 has 'rank 0', rank 1 'rank 1'"),
        ({"version": "9.9"}, "contract: rank 0 has 'paddle-hal-core"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_g14_any_difference_raises_on_all_ranks_before_a_collective(pool, actions, change, named):
    answers = pool.run(actions.disagree, PLAIN, {1: change}, ranks=[0, 1])
    for error, unchanged, later in answers.values():
        assert error is not None, "no rank may go on"
        assert error[0] == "StateUnusable"
        assert named in error[1]
        assert error[1].startswith("cpu:0: broadcast_tokens: state")
        assert unchanged, "a collective wrote to the state"
        assert later is not None
        assert later[0] == "StateUnusable"
    pool.run(actions.agree, [(0, 1)], (), PLAIN, 1, 1, ranks=[0, 1])  # the group itself is healthy


def test_g14_ranks_that_open_other_groups_are_named_on_all(pool, actions):
    answers = pool.run(actions.open_own, {0: [(0, 1)], 1: [(0, 1)], 2: [(0, 1)], 3: [(0, 1), (2, 3)]})
    for kind, text in answers.values():
        assert kind == "InvalidValue"
        assert "groups: rank 0 has '(0, 1)', rank 3 '(0, 1) (2, 3)'" in text


def test_g14_a_group_outside_the_job_is_refused_everywhere(pool, actions):
    answers = pool.run(actions.open_own, {key: [(0, 4)] for key in range(4)})
    assert all(kind == "InvalidValue" and "job of 4 ranks" in text for kind, text in answers.values())
