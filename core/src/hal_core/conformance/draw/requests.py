"""Strategies for sizes, requests and step orders. Small on purpose: bounds are met at once, and failures read well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ...slots.admission import Request, SamplingParams
from ...slots.fields import SplitRole, StateConfig
from ..kit import Draw

tokens = st.integers(0, 3) | st.sampled_from([7, 2**31 - 1])
"""Token ids: few, so that end tokens and stop sequences are met; and the largest."""

wide_tokens = tokens | st.sampled_from([2**31, 2**40 + 1, 2**63 - 1])
"""What a step's kernels may put into an int64 field."""


def sizes(*, drafts: bool | None = None, most_slots: int = 7) -> st.SearchStrategy[StateConfig]:
    """Sizes of a state; ``drafts`` says whether it is speculative (None: either)."""
    low, high = {None: (0, 3), True: (1, 3), False: (0, 0)}[drafts]
    return st.builds(
        StateConfig,
        num_slots=st.integers(1, most_slots),
        max_model_len=st.integers(6, 24),
        block_size=st.integers(1, 4),
        max_draft_tokens=st.integers(low, high),
        max_logprobs=st.integers(0, 3),
        max_eos=st.integers(1, 3),
        max_stop_sequences=st.integers(1, 3),
        max_stop_length=st.integers(1, 3),
        max_bad_words=st.integers(1, 4),
    )


def _ids(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(tokens, max_size=most).map(tuple)


def params(size: StateConfig, generated: int) -> st.SearchStrategy[SamplingParams]:
    """Sampling parameters that fit a state and leave something to generate after ``generated`` tokens."""
    stops = st.lists(st.lists(tokens, min_size=1, max_size=size.max_stop_length).map(tuple), max_size=99)
    number = st.floats(0.0, 2.0, width=32)
    most = st.integers(generated + 1, generated + 9)
    return most.flatmap(
        lambda limit: st.builds(
            SamplingParams,
            temperature=number,
            top_k=st.integers(0, 2**31 - 1),
            top_p=st.floats(0.1, 1.0),
            min_p=st.floats(0.0, 1.0),
            seed=st.integers(0, 2**63 - 1),
            repetition_penalty=st.floats(0.5, 2.0),
            frequency_penalty=st.floats(-2.0, 2.0),
            presence_penalty=st.floats(-2.0, 2.0),
            min_tokens=st.integers(0, min(limit, 3)),
            max_tokens=st.just(limit),
            stop_sequences=stops.map(lambda found: tuple(found[: size.max_stop_sequences])),
            bad_words=_ids(size.max_bad_words),
            eos_token_ids=_ids(size.max_eos),
            logprobs=st.none() | st.integers(0, size.max_logprobs),
        )
    )


@st.composite
def requests(draw: st.DrawFn, size: StateConfig, name: str, role: SplitRole | None = None) -> Request:
    """A request that fits a state: new, or resumed with some output."""
    total = draw(st.integers(1, size.max_model_len - 1))
    generated = draw(st.just(0) | st.integers(0, total - 1))
    listed = draw(st.lists(tokens, min_size=total, max_size=total))
    return Request(
        name,
        listed[: total - generated],
        draw(params(size, generated)),
        listed[total - generated :],
        draw(st.sampled_from(SplitRole)) if role is None else role,
    )


def orders(slots: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """All of ``slots``, as some worker may have them in its batch."""
    return st.permutations(sorted(slots))


def draw_array(draw: Draw, shape: tuple[int, ...], elements: st.SearchStrategy[Any], dtype: str, label: str) -> Any:  # noqa: ANN401
    """An array of drawn elements."""
    count = int(np.prod(shape))
    return np.array(draw(st.lists(elements, min_size=count, max_size=count), label), dtype).reshape(shape)
