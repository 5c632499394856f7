"""A guard around a plugin's proposer: its errors and invalid answers name its distribution."""

from __future__ import annotations

import math
import reprlib
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
from hal_core import GroupLost

from .host import Extends, Guess
from .proposer import Drawn, Fed, Int64s, Proposer, Setup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hal_core import AdmittedRequest

    from hal.discovery import Entry

P = ParamSpec("P")
T = TypeVar("T")


class _Wrong(Exception):
    """An invalid answer, with the reason."""


class Guarded:
    """A proposer of ``entry`` whose answers are checked and whose errors become :class:`hal_core.PluginError`.

    A lost group is not its fault, so :class:`hal_core.GroupLost` passes through.
    """

    def __init__(self, inner: Proposer, entry: Entry, setup: Setup) -> None:
        self.inner, self.wants_hidden = inner, inner.wants_hidden
        self._entry, self._vocab_size = entry, setup.vocab_size
        self.draft_cost = self._guard("draft_cost", self._cost)

    def enter(self, slot: int, request: AdmittedRequest, tokens: Int64s) -> None:
        """Forward the call."""
        self._guard("enter", self.inner.enter, slot, request, tokens)

    def observe(self, fed: Fed) -> None:
        """Forward the call."""
        self._guard("observe", self.inner.observe, fed)

    def propose(self, room: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the drafts if all are tokens and have room: too many are an error, and are not cut."""
        return self._guard("propose", lambda: self._drafts(self.inner.propose(dict(room)), room))

    def leave(self, slot: int, *, finished: bool) -> None:
        """Forward the call."""
        self._guard("leave", self.inner.leave, slot, finished=finished)

    def close(self) -> None:
        """Forward the call."""
        self._guard("close", self.inner.close)

    def _guard(self, method: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return call(*arguments, **named)
        except GroupLost:
            raise
        except _Wrong as wrong:
            raise self._entry.error(f"{method} gave {wrong}") from None
        except (Exception, SystemExit) as error:
            what = " ".join("".join(traceback.format_exception_only(error)).split())
            raise self._entry.error(f"{method} failed: {what[:400]}") from error

    def _cost(self) -> float:
        cost: object = getattr(self.inner, "draft_cost", 0.0)
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise _Wrong(f"{_shown(cost)}, which is no number from 0 up")
        return float(cost)

    def _drafts(self, answer: object, room: Mapping[int, int]) -> dict[int, list[int]]:
        if not isinstance(answer, Mapping):
            raise _Wrong(f"{_shown(answer)}, and not a dict of slots and their drafts")
        drafts: dict[int, list[int]] = {}
        for key, tokens in answer.items():
            slot = _integer(key, "the slot")
            if slot not in room:
                raise _Wrong(f"drafts for slot {slot}, which has no room for any")
            drafts[slot] = self._tokens(tokens, room[slot], f" for slot {slot}")
        return drafts

    def _tokens(self, given: object, most: int, where: str) -> list[int]:
        """Return the drafts of a slot as a new list."""
        if not isinstance(given, list | tuple | np.ndarray):
            raise _Wrong(f"{_shown(given)}{where}, and not a list of tokens")
        if len(given) > most:
            raise _Wrong(f"{len(given)} drafts{where}, which has room for {most}")
        tokens = [_integer(token, f"the draft{where}") for token in given]
        wrong = [token for token in tokens if not 0 <= token < self._vocab_size]
        if wrong:
            raise _Wrong(f"{_shown(wrong[0])}{where}, and tokens go from 0 to {self._vocab_size - 1}")
        return Drawn(tokens, self._weights(tokens, given.weights, where)) if isinstance(given, Drawn) else tokens

    def _weights(self, tokens: list[int], weights: Sequence[Int64s], where: str) -> list[Int64s]:
        """Return the distributions that the drafts were drawn from."""
        found = list(weights)
        if len(found) != len(tokens):
            raise _Wrong(f"{len(found)} weights for {len(tokens)} drafts{where}")
        for token, row in zip(tokens, found, strict=True):
            if not isinstance(row, np.ndarray) or row.dtype != np.int64 or row.shape != (self._vocab_size,):
                raise _Wrong(f"weights{where} that are no int64 [{self._vocab_size}]")
            if row[token] <= 0 or row.min() < 0:
                raise _Wrong(f"weights{where} by which the draft {token} cannot have been drawn")
        return found


class GuardedSecond(Guarded):
    """A guarded proposer that can also continue another's drafts."""

    inner: Extends

    def guess(self, slot: int, drafts: Sequence[int], most: int) -> Guess:
        """Return the possible continuation, checked like a proposal."""
        return self._guard("guess", lambda: self._guess(self.inner.guess(slot, list(drafts), most), most))

    def _guess(self, answer: object, most: int) -> Guess:
        if not isinstance(answer, Guess):
            raise _Wrong(f"{_shown(answer)}, and not a hal_engine.proposers.host.Guess")
        matched = _integer(answer.matched, "matched")
        return Guess(self._tokens(answer.drafts, most, ""), matched, answer.score)


def guarded(inner: Proposer, entry: Entry, setup: Setup) -> Proposer:
    """Return the guarded proposer, with the proposer's own abilities."""
    return (GuardedSecond if callable(getattr(inner, "guess", None)) else Guarded)(inner, entry, setup)


def _integer(value: object, what: str) -> int:
    if type(value) is int:  # the usual case
        return value
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _Wrong(f"{_shown(value)} as {what}, which is no whole number")
    return int(value)


def _shown(value: object) -> str:
    """Return an unexpected value in few characters, with its type."""
    return "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
