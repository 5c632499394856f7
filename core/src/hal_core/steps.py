"""The value objects of one step: which slots it ran, in which order, and with what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from .errors import InvalidValue
from .group import ALONE, Group

Int32s = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a worker.

    - ``number``: counts up from 0; it is in every frame.
    - ``orders``: state name to int32 ``[n]``: the slot of each batch id, in batch-id order, for each state the step
      used (G20). Preempted and aborted slots are named too, so that they are reported.
    - ``speculative``: the step verified drafts, so its tokens are in ``accept_tokens``, else in ``sampled_token_ids``.
    - ``group``: the caller's tensor-parallel group; only its first rank sends (G17).
    - ``logprobs``: how many alternatives the step wrote besides the sampled token, None for no log-probabilities.
    - ``errors``: slot to message, for requests that the step could not go on with.
    - ``recovered``: slot to message, for requests that were stopped by the recovery of their worker.
    """

    number: int
    orders: Mapping[str, Int32s]
    speculative: bool = False
    group: Group = ALONE
    logprobs: int | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    recovered: Mapping[int, str] = field(default_factory=dict)
    spans: Mapping[str, tuple[int, int]] = field(init=False, repr=False)
    """State name to the lowest and the highest slot of its order; (0, -1) for an empty one."""

    def __post_init__(self) -> None:
        if self.number < 0:
            raise InvalidValue(f"step number {self.number}", cure="count up from 0", argument="step")
        orders: dict[str, Int32s] = {}
        spans: dict[str, tuple[int, int]] = {}
        for name, order in self.orders.items():
            slots = np.array(order, np.int32)
            rising = np.unique(slots)
            if slots.ndim != 1 or len(rising) != len(slots):
                raise InvalidValue(
                    f"the order of state {name!r} must name each slot once, as one list",
                    cure="give the slot of each batch id, in batch-id order",
                    argument="step",
                )
            slots.flags.writeable = False
            orders[name] = slots
            spans[name] = (int(rising[0]), int(rising[-1])) if len(rising) else (0, -1)
        object.__setattr__(self, "spans", MappingProxyType(spans))
        object.__setattr__(self, "orders", MappingProxyType(orders))
        object.__setattr__(self, "errors", MappingProxyType(dict(self.errors)))
        object.__setattr__(self, "recovered", MappingProxyType(dict(self.recovered)))

    def order(self, state: str) -> Int32s:
        """The slot of each batch id in a state. Raises :class:`InvalidValue` when the step names none."""
        try:
            return self.orders[state]
        except KeyError:
            raise InvalidValue(
                f"step {self.number} names no order for state {state!r}",
                cure=f"it names {sorted(self.orders)}; add the state's slots in batch-id order",
                argument="step",
            ) from None


def predict_launch_tokens(requests: int, tokens_per_step: int) -> int:
    """How many tokens the next launch feeds while decoding: requests x tokens a step.

    FastDeploy derived it from sequence lengths and step counts, which is wrong as soon as the step that is running
    accepts another number of drafts than the one before (its pull request 7172). While decoding, each running
    request feeds one token and ``tokens_per_step - 1`` drafts, whatever was accepted before.
    """
    if requests < 0 or tokens_per_step < 1:
        raise InvalidValue(
            f"{requests} requests x {tokens_per_step} tokens a step",
            cure="give no negative count of requests, and at least one token a step",
            argument="requests",
        )
    return requests * tokens_per_step
