"""Sampling parameters of a request, checked when they are created."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np

from ..errors import InvalidValue


def check_number(name: str, value: object, low: float, high: float = math.inf, *, integer: bool = False) -> None:
    """Raise for anything but a number (a whole one if ``integer``) from ``low`` to ``high``; NaN is refused."""
    kinds = (int, np.integer) if integer else (int, float, np.integer, np.floating)
    if isinstance(value, bool | np.bool_) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "a whole number" if integer else "a number"
        bound = f"of at least {low}" if math.isinf(high) else f"from {low} to {high}"
        raise InvalidValue(f"{value!r}", cure=f"give {kind} {bound}", argument=name)


_PLAIN = {int, float, type(None)}
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Param:
    """A sampling parameter that is one number: its row.

    ``dtype``: of its field in the slot table; a float, or a whole number. ``low``, ``high``: its bounds. ``off``: its
    default, which changes nothing where the parameter is one that restricts. ``help``: what it does, for a user.
    """

    name: str
    dtype: str
    low: float
    high: float
    off: float
    help: str

    @property
    def integer(self) -> bool:
        """Whether it is a whole number."""
        return self.dtype.startswith("int")


def _param(dtype: str, low: float, high: float, off: float, about: str) -> Any:  # noqa: ANN401 (what a dataclass takes for a field)
    """Return the field of a parameter with its row, but for the name."""
    return field(default=off, metadata={"row": (dtype, low, high, off, about)})


def _plain(value: Any) -> int | float | None:  # noqa: ANN401 (a checked number)
    """Return a number of NumPy's as Python's: others can neither be packed nor sent to another process."""
    if value is None:
        return None
    return int(value) if isinstance(value, int | np.integer) else float(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for choosing a request's next token.

    - ``temperature``: 0 is greedy; otherwise logits are divided by it.
    - ``top_k`` (0: off), ``top_p`` (1: off), ``min_p`` (0: off): truncate the distribution, in this order.
    - ``seed``: draws depend only on seed, request and position.
    - ``repetition_penalty`` (1: off; Keskar et al. 2019), ``frequency_penalty``, ``presence_penalty`` (0: off).
    - ``min_tokens``: end and stop tokens cannot be sampled before; ``max_tokens``: most tokens to generate.
    - ``stop_sequences``, ``bad_words``, ``eos_token_ids``: token ids. A bad word is never sampled.
    - ``logprobs``: how many alternatives to report besides the sampled token; None for no log-probabilities.
    """

    temperature: float = _param("float32", 0.0, 1e6, 0.0, "Higher: more varied. 0: always the best token.")
    top_k: int = _param("int32", 0, _LARGEST, 0, "Draw from the N best tokens; 0: from all.")
    top_p: float = _param("float32", 0.0, 1.0, 1.0, "Draw from the best tokens that make up X of the probability.")
    min_p: float = _param("float32", 0.0, 1.0, 0.0, "Of these, draw from those at least X times as likely as the best.")
    seed: int = _param("int64", 0, 2**63 - 1, 0, "Draws depend on it, the prompt's number and the position.")
    repetition_penalty: float = _param(
        "float32", 1e-6, 1e6, 1.0, "Above 1: less of what the text has, prompt included."
    )
    frequency_penalty: float = _param("float32", -1e6, 1e6, 0.0, "Above 0: less of what was generated, for each time.")
    presence_penalty: float = _param("float32", -1e6, 1e6, 0.0, "Above 0: less of what was generated at all.")
    min_tokens: int = _param("int64", 0, _LARGEST, 0, "No end token and no stop text before N tokens.")
    max_tokens: int = _param("int64", 1, _LARGEST, 16, "Most tokens to generate for each prompt.")
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for one, value in zip(PARAMS, _numbers_of(self), strict=True):
            check_number(one.name, value, one.low, one.high, integer=one.integer)
        check_number("min_tokens", self.min_tokens, 0, self.max_tokens, integer=True)
        if self.top_p == 0.0:
            raise InvalidValue("0", cure="give a number above 0, at most 1", argument="top_p")
        if self.logprobs is not None:
            check_number("logprobs", self.logprobs, 0, _LARGEST, integer=True)
        if not _PLAIN.issuperset(map(type, (*_numbers_of(self), self.logprobs))):
            for name in (*PARAM_NAMES, "logprobs"):
                object.__setattr__(self, name, _plain(getattr(self, name)))
        for name in ("bad_words", "eos_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        sequences = _items("stop_sequences", self.stop_sequences, "a tuple of tuples of token ids, such as ((13, 10),)")
        object.__setattr__(self, "stop_sequences", tuple([_sequence(sequence) for sequence in sequences]))
        if any(not sequence for sequence in self.stop_sequences):
            raise InvalidValue("an empty stop sequence", cure="leave it out", argument="stop_sequences")


PARAMS = tuple(Param(one.name, *one.metadata["row"]) for one in fields(SamplingParams) if "row" in one.metadata)
"""The row of each parameter that is one number. From them come the checks here, the slot table, options of commands,
the server's schema and the requests that the conformance kit draws."""
PARAM_NAMES = tuple(one.name for one in PARAMS)
_numbers_of = attrgetter(*PARAM_NAMES)


def _items(name: str, values: Any, wanted: str) -> tuple[Any, ...]:  # noqa: ANN401 (the caller's)
    try:
        return tuple(values)
    except TypeError:
        raise InvalidValue(f"{values!r}", cure=f"give {wanted}", argument=name) from None


def _ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    ids = _items(name, values, "a tuple of token ids, such as (2,)")
    for value in ids:
        check_number(name, value, 0, 2**31 - 1, integer=True)
    return ids if _PLAIN.issuperset(map(type, ids)) else tuple(map(int, ids))


def _sequence(values: Sequence[int]) -> tuple[int, ...]:
    """Return one stop sequence; a bare token id is most likely a list without its outer brackets."""
    if isinstance(values, int | np.integer):
        raise InvalidValue(
            f"{values!r} in place of a sequence",
            cure="give a tuple of tuples of token ids, such as ((13, 10),)",
            argument="stop_sequences",
        )
    return _ids("stop_sequences", values)
