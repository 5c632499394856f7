"""G13 to G15 with real groups: equality byte for byte, terms, headers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hal_core.ranks.channel import HEADER, MAGIC
from hal_core.slots.fields import HEADER_BYTES, StateConfig
from hal_core.slots.layout import lay_out
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import share

sizes = st.builds(
    StateConfig,
    num_slots=st.integers(1, 9),
    max_model_len=st.integers(1, 40),
    max_draft_tokens=st.integers(0, 4),
    max_logprobs=st.integers(0, 3),
)
SPLITS = (((0, 1), (2, 3)), ((1, 0), (3, 2)), ((0, 1, 2, 3),), ((2, 0, 3, 1),), ((0, 2), (3, 1)))
PLAIN, SPECULATIVE = (
    StateConfig(num_slots=4, max_model_len=16),
    StateConfig(num_slots=4, max_model_len=16, max_draft_tokens=2),
)


@settings(max_examples=share.of(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_g13_fields_are_the_sources_byte_for_byte_and_nothing_else_changes(pool, actions, data):
    chosen, split = data.draw(sizes), data.draw(st.sampled_from(SPLITS))
    idle = data.draw(st.sampled_from([(), split[-1:] if len(split) > 1 else ()]))
    seen = pool.run(actions.agree, split, idle, chosen, data.draw(st.integers(0, 99)), 2)
    layout = lay_out(chosen)
    part = layout.groups["broadcast_speculative" if chosen.max_draft_tokens else "broadcast"]
    for group in split:
        for rank in group:
            for before, after, sources in zip(seen[rank][::2], seen[rank][1::2], seen[group[0]][::2], strict=True):
                if group in idle:
                    assert after == before, f"rank {rank} of the idle group {group} changed"
                    continue
                begin, end = part.offset + HEADER_BYTES, part.end
                assert after[begin:end] == sources[begin:end], f"rank {rank} differs from its source {group[0]}"
                assert after[: part.offset] + after[end:] == before[: part.offset] + before[end:]


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


def test_g14_ranks_that_open_other_groups_are_all_told(pool, actions):
    answers = pool.run(actions.open_own, {0: [(0, 1)], 1: [(0, 1)], 2: [(0, 1)], 3: [(0, 1), (2, 3)]})
    for kind, text in answers.values():
        assert kind == "InvalidValue"
        assert "groups: rank 0 has '(0, 1)', rank 3 '(0, 1) (2, 3)'" in text


def test_g14_a_group_outside_the_job_is_refused_everywhere(pool, actions):
    answers = pool.run(actions.open_own, {key: [(0, 4)] for key in range(4)})
    assert all(kind == "InvalidValue" and "job of 4 ranks" in text for kind, text in answers.values())


def test_g14_a_rank_that_missed_a_broadcast_finds_out_and_sends_nothing(pool, actions):
    answers = pool.run(actions.skipping, PLAIN, 1, 1, ranks=[0, 1])
    sent, error, later = answers[1]
    assert sent == []
    assert error[0] == "StateUnusable"
    assert "broadcast 2 after 1 steps" in error[1]
    assert "is at broadcast 2 after 2 steps" in error[1]
    assert later[0] == "StateUnusable"
    assert answers[0][1][0] == "GroupLost"  # the other rank's next broadcast finds no peer


def test_g14_a_source_that_missed_a_broadcast_is_found_out_by_the_others(pool, actions):
    answers = pool.run(actions.skipping, PLAIN, 0, 1, ranks=[0, 1])
    assert answers[1][1][0] == "StateUnusable"
    assert answers[0][1][0] == "GroupLost"
    assert answers[0][0] == [0, 1, 2]


def test_g14_nothing_is_sent_of_a_step_whose_header_is_wrong(pool, actions):
    answers = pool.run(actions.tampered, PLAIN, ranks=[0, 1])
    for said, records, usable in answers.values():
        assert said[0] == "StateUnusable"
        assert records == 0
        assert usable[0] == "StateUnusable"


def test_g15_a_group_of_one_communicates_nothing_and_needs_no_framework():
    script = """
import sys
from hal_core import StateConfig, hookimpl
from hal_core.runtime.bound import bind
from hal_core.devices.cpu.device import CpuDevice
from hal_core.group import Group
class Watched(CpuDevice):
    def communicator(self, group):
        raise SystemExit("asked for a communicator")
device = bind(Watched(0, {}))
state = device.state(StateConfig(num_slots=2, max_model_len=8))
before = state.memory.buffer.copy()
for rank in (0, 3):
    device.broadcast_tokens(state=state, group=Group((rank,), rank), stream=device.default_stream).wait()
assert (state.memory.buffer == before).all() and not state.channels
assert "paddle" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
