"""``hal run --live``: what a run is doing, below its text: slots, tokens a second, drafts, the hooks' times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from hal_core import BoundDevice, hookimpl

if TYPE_CHECKING:
    from hal_engine.opening import Opened

_Watching = Generator[None, Any, Any]
_BAR = 20
_RECORDS = 200
"""Rates are those of the last records."""


class HookTimes:
    """An observer that keeps each hook's calls and microseconds."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[int, float]] = {}

    @hookimpl(wrapper=True)
    def insert_tasks(self) -> _Watching:
        """See the hook."""
        return (yield from self._timed("insert_tasks"))

    @hookimpl(wrapper=True)
    def async_set_value(self) -> _Watching:
        """See the hook."""
        return (yield from self._timed("async_set_value"))

    @hookimpl(wrapper=True)
    def broadcast_tokens(self) -> _Watching:
        """See the hook."""
        return (yield from self._timed("broadcast_tokens"))

    @hookimpl(wrapper=True)
    def save_output(self) -> _Watching:
        """See the hook."""
        return (yield from self._timed("save_output"))

    def _timed(self, hook: str) -> _Watching:
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            calls, spent = self.spent.get(hook, (0, 0.0))
            self.spent[hook] = calls + 1, spent + (time.perf_counter() - began) * 1e6


class LivePanel:
    """The lines of a run, made anew with each record. ``fallbacks``: lines about what falls back."""

    def __init__(self, opened: Opened, slots: int, fallbacks: Sequence[str]) -> None:
        self._opened, self._slots, self._fallbacks = opened, slots, fallbacks
        self._past = deque[tuple[float, int, int]](maxlen=_RECORDS)  # when, tokens and steps
        self._times = HookTimes()
        if isinstance(opened.device, BoundDevice):  # of ranks the hooks are called elsewhere
            opened.device.observe(self._times, name="--live")

    def text(self, progress: str, tokens: int) -> str:
        """Return the lines; ``progress``: the usual line; ``tokens``: that have come so far."""
        engine, now = self._opened.engine, time.perf_counter()
        self._past.append((now, tokens, engine.steps))
        began, before, steps = self._past[0]
        seconds, steps = max(now - began, 1e-9), engine.steps - steps
        running, waiting, cache = engine.load()
        done = _BAR * min(running, self._slots) // self._slots
        lines = [
            progress,
            f"slots  [{'#' * done}{'.' * (_BAR - done)}] {running} of {self._slots}, {waiting} waiting, "
            f"{100 * cache:.0f} % of the KV blocks, {engine.preemptions} preempted",
            f"speed  {(tokens - before) / seconds:.0f} tokens/s, {steps / seconds:.0f} steps/s",
        ]
        if (drafted := (found := self._opened.acceptance()).drafted) > 0:
            share = 100 * found.accepted / drafted
            lines.append(f"drafts {share:.0f} % of {drafted} accepted, {found.tokens_a_turn:.2f} tokens a step")
        return "\n".join((*lines, *self.hooks(), *self._fallbacks))

    def hooks(self) -> list[str]:
        """Return the line with the mean time of each hook's calls; no line if none was seen."""
        each = [f"{hook} {spent / calls:.0f} us" for hook, (calls, spent) in self._times.spent.items()]
        return [f"hooks  {', '.join(each)}"] if each else []
