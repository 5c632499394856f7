"""The value objects of one step: its slots, their order, and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ..errors import InvalidValue
from ..group import ALONE, Group
from .int_columns import Int32s

Places = np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of a worker.

    - ``number``: counts up from 0; it is in every frame.
    - ``orders``: state name to int32 ``[n]``: the slot of each batch id, in batch-id order, for each state the step
      used (G20). Preempted and aborted slots are named too, so that they are reported.
    - ``speculative``: the step verified drafts, so its tokens are in ``accept_tokens``, else in ``sampled_token_ids``.
    - ``group``: the caller's tensor-parallel group; only its first rank sends (G17).
    - ``logprobs``: how many alternatives the step wrote besides the sampled token, None for no log-probabilities.
    - ``errors``: slot to message, for requests that the step could not continue.
    - ``recovered``: slot to message, for requests that were stopped by the recovery of their worker.
    - ``late_errors``: returns further ``errors`` when the step's output is on the host, for conditions that only the
      device knows before, such as unusable logits. Called at most twice, on the thread that makes the record; the step
      has set ``stop_flags`` of these slots before ``update_inputs``. None: no late errors.

    Raises :class:`InvalidValue` for anything else, and for a message of a slot that is in no order.
    """

    number: int
    orders: Mapping[str, Int32s]
    speculative: bool = False
    group: Group = ALONE
    logprobs: int | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    recovered: Mapping[int, str] = field(default_factory=dict)
    late_errors: Callable[[], Mapping[int, str]] | None = None
    spans: Mapping[str, tuple[int, int]] = field(init=False, repr=False)
    """State name to the lowest and the highest slot of its order; (0, -1) for an empty one."""
    places: Mapping[str, Places] = field(init=False, repr=False)
    """The orders in NumPy's index type: any other integer type is converted, which releases the GIL."""

    def __post_init__(self) -> None:
        self._check_scalars()
        if not _is_mapping(self.orders):
            raise _refused(f"orders = {self.orders!r}", "give a mapping of state name to slots in batch-id order")
        orders: dict[str, Int32s] = {}
        spans: dict[str, tuple[int, int]] = {}
        places: dict[str, Places] = {}
        for name, order in self.orders.items():
            slots = _slots(name, order)
            rises = (slots[1:] > slots[:-1]).all()
            rising = slots if rises else np.sort(slots)
            if not rises and np.count_nonzero(rising[1:] == rising[:-1]):
                raise _refused(f"the order of state {name!r} must name each slot once, as one list", _ORDER)
            slots.flags.writeable = False
            orders[name], places[name] = slots, slots.astype(np.intp)
            spans[name] = (int(rising[0]), int(rising[-1])) if len(rising) else (0, -1)
        object.__setattr__(self, "spans", MappingProxyType(spans))
        object.__setattr__(self, "orders", MappingProxyType(orders))
        object.__setattr__(self, "places", MappingProxyType(places))
        for name in ("errors", "recovered"):
            object.__setattr__(self, name, MappingProxyType(_messages(name, getattr(self, name), orders)))

    def again(self, number: int, late_errors: Callable[[], Mapping[int, str]] | None = None) -> Step:
        """Return a step with the same slots, which are not checked again, and without this one's errors."""
        made, put = object.__new__(Step), object.__setattr__  # 1 us; made and checked anew 6 us (128 slots)
        for name in ("orders", "speculative", "group", "logprobs", "spans", "places"):
            put(made, name, getattr(self, name))
        put(made, "number", number)
        put(made, "late_errors", late_errors)
        put(made, "errors", _NONE)
        put(made, "recovered", _NONE)
        made._check_number()
        return made

    def _check_number(self) -> None:
        if type(self.number) is not int or not 0 <= self.number < 2**63:
            raise _refused(f"step number {self.number!r}", "count up from 0, in Python integers below 2**63")

    def _check_scalars(self) -> None:
        """Refuse values that no step can have; a hook checks them against its state."""
        self._check_number()
        logprobs = self.logprobs
        if not isinstance(self.group, Group):
            raise _refused(f"group = {self.group!r}", "give a Group, or leave it out for a single worker")
        if logprobs is not None and type(logprobs) is not int:
            raise _refused(f"logprobs = {logprobs!r}", "give a whole number of alternatives, or None")
        if type(self.speculative) is not bool:
            raise _refused(f"speculative = {self.speculative!r}", "give True or False")

    def order(self, state: str) -> Int32s:
        """Return the slot of each batch id in a state. Raises :class:`InvalidValue` if the step names none."""
        try:
            return self.orders[state]
        except KeyError:
            raise InvalidValue(
                f"step {self.number} names no order for state {state!r}",
                cure=f"it names {sorted(self.orders)}; add the state's slots in batch-id order",
                argument="step",
            ) from None


_INT32 = np.dtype(np.int32)
_NONE: Mapping[int, str] = MappingProxyType({})
_ORDER = "give the slot of each batch id, in batch-id order"


def _refused(what: str, cure: str) -> InvalidValue:
    return InvalidValue(what, cure=cure, argument="step")


def _is_mapping(given: object) -> bool:
    """Return whether it is a mapping. A dict is checked first, as isinstance on an abstract class costs more than all
    other checks."""
    return type(given) is dict or isinstance(given, Mapping)


def _slots(name: object, order: Any) -> Int32s:  # noqa: ANN401 (a list or an array)
    """Return an order as a new array; anything but whole numbers that fit int32 is refused, not rounded or cut."""
    if type(name) is not str:
        raise _refused(f"orders has the state name {name!r}", "give state names as strings")
    plain = isinstance(order, np.ndarray)
    if plain and order.dtype == _INT32 and order.ndim == 1:
        return np.array(order, np.int32)
    try:
        found = np.array(order) if plain or not {bool, np.bool_} & set(map(type, order)) else None
    except (TypeError, ValueError, OverflowError):  # a bare number, a ragged list, no sequence at all
        found = None
    if found is not None and found.ndim == 1 and found.size == 0:
        return np.zeros(0, np.int32)
    if found is None or found.ndim != 1 or found.dtype.kind not in "iu":
        raise _refused(f"the order of state {name!r} must be one list of whole numbers", _ORDER)
    low, high = int(found.min()), int(found.max())
    if low < -(2**31) or high >= 2**31:
        raise _refused(f"the order of state {name!r} names slots {low} to {high}, which do not fit int32", _ORDER)
    return found.astype(np.int32)


def _messages(name: str, given: Any, orders: Mapping[str, Int32s]) -> dict[int, str]:  # noqa: ANN401 (the caller's)
    """Return slot to message, as a copy; a slot in no order has no row for its message."""
    if not _is_mapping(given):
        raise _refused(f"{name} = {given!r}", "give a mapping of slot to message")
    if not given:
        return {}
    for slot, text in given.items():
        is_slot = isinstance(slot, int | np.integer) and not isinstance(slot, bool)
        if not is_slot or not isinstance(text, str):
            raise _refused(f"{name} has {slot!r}: {text!r}", "give the slot as a whole number and its message as text")
    named = set().union(*(order.tolist() for order in orders.values()))
    unknown = sorted(int(slot) for slot in given if slot not in named)
    if unknown:
        raise _refused(
            f"{name} names slots {unknown}, which are in no order of the step",
            "name each such slot in the order of its state too, so that it has a row",
        )
    return {int(slot): text for slot, text in given.items()}


def predict_launch_tokens(requests: int, tokens_per_step: int) -> int:
    """Return how many tokens the next launch feeds while decoding: requests x tokens a step.

    FastDeploy derived it from sequence lengths and step counts. That is wrong as soon as the running step accepts
    another number of drafts than the one before (its pull request 7172). While decoding, each running request feeds one
    token and ``tokens_per_step - 1`` drafts, regardless of earlier acceptance.

    :raises InvalidValue: for less than 0 requests, or less than one token a step.
    """
    if requests < 0 or tokens_per_step < 1:
        raise InvalidValue(
            f"{requests} requests x {tokens_per_step} tokens a step",
            cure="give no negative count of requests, and at least one token a step",
            argument="requests",
        )
    return requests * tokens_per_step
