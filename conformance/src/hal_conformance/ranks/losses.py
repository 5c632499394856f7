"""Work of ranks for the tests of lost and hung ranks (G16); see :mod:`hal_conformance.ranks.work`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from hal_core.slots.fields import StateConfig
from hal_core.slots.state import SlotState

from ..harness import backdoor
from .pool import TIMEOUT
from .processes import Rank
from .work import Groups, Met, contract_error, group_of, opened

if TYPE_CHECKING:
    from hal_core.runtime.bound import BoundDevice

    from ..harness.subject import Recipe


PAUSE = 0.005
"""Seconds between two broadcasts of a group that should be lost by then."""


@dataclass
class Lost:
    """The results of a rank whose group lost a member: successful calls, the errors, and later calls."""

    calls: int
    error: Met | None
    again: Met | None = None
    another_state: Met | None = None
    rest: Met | None = None


def until_lost(broadcast: Callable[[int], None], most: int, *, missed: bool) -> tuple[int, Met | None]:
    """Broadcast ``most`` times, or until there is an error; return the successful broadcasts and the error.

    ``missed``: a rank of the group will not come. The loop then lasts longer than a call may, as the source's calls end
    if a library buffers the data (NCCL between hosts does).
    """
    calls, error = 0, None
    end = monotonic() + (2 * TIMEOUT if missed else 0.0)
    while error is None and (calls < most or monotonic() < end):
        error = contract_error(partial(broadcast, calls))
        calls += error is None
        if calls > most:
            threading.Event().wait(PAUSE)
    return calls, error


def lose(rank: Rank, recipe: Recipe, groups: Groups, victim: int, how: str, well: int = 2, most: int = 200) -> Lost:
    """Broadcast until the group is lost; ``victim`` kills or stops itself after ``well`` broadcasts.

    In a group without the victim, broadcast ``most`` times. See :func:`until_lost`.
    """
    group = group_of(rank, groups)
    with opened(recipe) as bound:
        stream = bound.default_stream
        state, other = (
            bound.state(StateConfig(num_slots=4, max_model_len=16), name=name) for name in ("target", "other")
        )

        def broadcast(of: SlotState) -> None:
            # Without a timeout: the device itself must end the call.
            bound.broadcast_tokens(state=of, group=group, stream=stream).wait()

        def one(calls: int) -> None:
            if rank.rank == victim and calls == well:
                os.kill(os.getpid(), signal.SIGKILL if how == "lost" else signal.SIGSTOP)
            broadcast(state)

        calls, error = until_lost(one, most, missed=victim in group.ranks)
        if error is None:
            return Lost(calls, None)
        return after_loss(bound, calls, error, broadcast, state, other)


def after_loss(
    bound: BoundDevice,
    calls: int,
    error: Met,
    broadcast: Callable[[SlotState], None],
    state: SlotState,
    other: SlotState,
) -> Lost:
    """Broadcast both states again, then write to ``other`` on another stream, and return how each call ended."""
    again, another = contract_error(lambda: broadcast(state)), contract_error(lambda: broadcast(other))

    def work_on() -> None:
        elsewhere = bound.device.stream()  # the first stream may wait for the lost rank until the process ends
        bound.async_set_value(target=other.view("seed"), value=7, stream=elsewhere).wait(backdoor.PATIENCE)
        bound.insert_tasks(state=other, tasks=[], stream=elsewhere).wait(backdoor.PATIENCE)

    return Lost(calls, error, again, another, contract_error(work_on))
