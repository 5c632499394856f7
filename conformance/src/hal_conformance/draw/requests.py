"""Strategies for sizes, requests and step orders. Small on purpose: they reach bounds at once, and failures read
well."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.sampling_params import PARAMS
from hypothesis import strategies as st

from ..kit import Draw

tokens = st.integers(0, 3) | st.sampled_from([7, 2**31 - 1])
"""Token ids: few, so that end tokens and stop sequences occur; and the largest."""

wide_tokens = tokens | st.sampled_from([2**31, 2**40 + 1, 2**63 - 1])
"""Values that a step's kernels may put into an int64 field."""


def sizes(*, drafts: bool | None = None, most_slots: int = 7) -> st.SearchStrategy[StateConfig]:
    """Return sizes of a state; ``drafts``: whether it is speculative (None: either)."""
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


_TABLE = (0, 1, 2, 3, 7, 2**31 - 1, 7, 2**31 - 1)
"""The token of a byte, as often as in :data:`tokens`."""

_BLOCKS = (*range(10), *[2**31 - 1] * 6)


def _named(found: bytes) -> tuple[int, ...]:
    return tuple([_TABLE[byte % len(_TABLE)] for byte in found])


# A request has some hundred numbers, and a run of the kit thousands of requests. So its rows are drawn as one byte
# string each, and no strategy is made twice: five times as fast as lists of numbers.


@functools.cache
def whole(low: int, high: int) -> st.SearchStrategy[int]:
    """Return a whole number from ``low`` to ``high``."""
    return st.integers(low, high)


@functools.cache
def row(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Return ``least`` to ``most`` :data:`tokens`."""
    return st.binary(min_size=least, max_size=most).map(_named)


@functools.cache
def blocks(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """Return ``least`` to ``most`` ids of KV blocks: small ones, and the largest."""
    return st.binary(min_size=least, max_size=most).map(lambda found: [_BLOCKS[byte % len(_BLOCKS)] for byte in found])


@functools.cache
def _stops(most: int, longest: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    return st.lists(row(1, longest), max_size=most).map(tuple)


@functools.cache
def _logprobs(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, most)


_NUMBERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        one.name: st.integers(int(one.low), int(one.high))
        if one.integer
        else st.floats(max(one.low, 0.125) if one.off else max(one.low, -2.0), min(one.high, 2.0))
        for one in PARAMS
        if one.name not in ("min_tokens", "max_tokens")
    }
)
_FRESH = st.booleans()
_ROLES = st.sampled_from(SplitRole)


def _params(draw: st.DrawFn, size: StateConfig, least: int) -> SamplingParams:
    """Return sampling parameters that fit a state; ``least``: of ``max_tokens``."""
    most = draw(whole(least, least + 8))
    return SamplingParams(
        **draw(_NUMBERS),
        min_tokens=draw(whole(0, min(most, 3))),
        max_tokens=most,
        stop_sequences=draw(_stops(size.max_stop_sequences, size.max_stop_length)),
        bad_words=draw(row(0, size.max_bad_words)),
        eos_token_ids=draw(row(0, size.max_eos)),
        logprobs=draw(_logprobs(size.max_logprobs)),
    )


@st.composite
def requests(draw: st.DrawFn, size: StateConfig, name: str, role: SplitRole | None = None, *, left: int = 1) -> Request:
    """Return a request that fits a state: new, or resumed with some output. ``left``: the least tokens it can still
    generate."""
    total = draw(whole(1, size.max_model_len - left))
    generated = 0 if draw(_FRESH) else draw(whole(0, total - 1))
    listed = draw(row(total, total))
    params = _params(draw, size, generated + left)
    role = draw(_ROLES) if role is None else role
    return Request(name, listed[: total - generated], params, listed[total - generated :], role)


def orders(slots: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Return all of ``slots``, in the order of some worker's batch."""
    return st.permutations(sorted(slots))


def draw_array(draw: Draw, shape: tuple[int, ...], elements: st.SearchStrategy[Any], dtype: str, label: str) -> Any:  # noqa: ANN401
    """Return an array of drawn elements."""
    count = int(np.prod(shape))
    return np.array(draw(st.lists(elements, min_size=count, max_size=count), label), dtype).reshape(shape)
