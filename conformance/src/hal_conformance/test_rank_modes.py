"""Every mode of decoding on real ranks that sample differently, on a state of either kind (G13)."""

from __future__ import annotations

from typing import Any

import pytest
from hal_core.slots.fields import StateConfig

from .harness.guarantees import RANKS, guarantee
from .kit import Kit
from .ranks import modes as rank_modes
from .ranks.pool import GROUPS
from .test_ranks import PAIR, assert_well, told

PLAIN, VERIFIES = (False, False, False), (True, True, True)
CASES = {
    "none": (0, PLAIN, False),
    "naive, plain steps on a state with drafts": (2, PLAIN, False),
    "naive, verifying none": (1, VERIFIES, False),
    "n-gram": (2, VERIFIES, True),
    "suffix": (3, VERIFIES, True),
    "MTP": (1, VERIFIES, True),
    "plain steps among verifying ones": (2, (True, False, False, True, False), False),
}
"""Mode of decoding to (drafts the state is sized for, for each step whether it verifies drafts, whether a proposer
runs)."""


@guarantee(13, requires=RANKS)
@pytest.mark.parametrize("groups", [PAIR, GROUPS, ((1, 0),)], ids=["two-ranks", "two-by-two", "reversed"])
@pytest.mark.parametrize("mode", CASES)
def test_g13_ranks_that_draw_apart_agree_in_every_mode(kit: Kit, mode: str, groups: Any) -> None:  # noqa: ANN401
    max_draft_tokens, kinds, proposes = CASES[mode]
    size = StateConfig(num_slots=3, max_model_len=32, max_draft_tokens=max_draft_tokens, max_logprobs=0)
    answers = kit.ranks.run(kit.recipe, rank_modes.step_apart, groups, size, kinds, proposes, ranks=told(groups))
    for group in groups:
        source = answers[group[0]]
        for rank in group:
            mine = answers[rank]
            assert_well(rank, mine.error, f"decoding ({mode})")
            for number, (got, should) in enumerate(zip(mine.fields, source.fields, strict=True)):
                other = [name for name in should if got[name] != should[name]]
                assert not other, f"{mode}: after step {number} rank {rank} differs from rank {group[0]} in {other}"
            assert mine.known == source.known, f"rank {rank} knows {mine.known}, but rank {group[0]} {source.known}"
        drawn_by = {token // 100 % 10 for tokens in source.known for token in tokens}
        assert drawn_by == {group[0]}, f"{mode}: group {group} has the tokens of ranks {drawn_by}, not of {group[0]}"
