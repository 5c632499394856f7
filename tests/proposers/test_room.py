"""The room for drafts: the next step feeds no token without a place, and may emit all that it feeds."""

import numpy as np
from hal_engine.proposers import draft_room
from hypothesis import given
from hypothesis import strategies as st

slots = st.tuples(*[st.integers(0, 12)] * 4, st.booleans())


def fits(drafts, prompt, generated, max_tokens, row, covered):
    """Whether a step with so many drafts is possible: the KV of its input has a place, and so have all tokens it may
    emit.
    """
    known = prompt + generated
    fed_until, given_until = known + drafts, known + drafts + 1
    return fed_until <= covered and given_until <= row and generated + drafts + 1 <= max_tokens


@given(st.integers(0, 6), st.lists(slots, min_size=1, max_size=6), st.integers(1, 30))
def test_the_room_is_the_most_drafts_that_fit(most, rows, row):
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    prompt, generated, max_tokens, covered, decoding = columns
    room = draft_room(
        most,
        generated=generated,
        max_tokens=max_tokens,
        known=prompt + generated,
        max_model_len=row,
        covered=covered,
        decoding=decoding,
    )
    assert room.dtype == np.int64
    for found, (prompt_len, done, wanted, held, decodes) in zip(room.tolist(), rows, strict=True):
        able = [d for d in range(1, most + 1) if decodes and fits(d, prompt_len, done, wanted, row, held)]
        assert found == max(able, default=0)
