"""Work of ranks for the tests of broadcasts that wait for one another, of several states and streams."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.memory.views import ByteRange
from hal_core.output.sinks import MemorySink
from hal_core.slots.declared import StateField
from hal_core.slots.fields import StateConfig
from hal_core.slots.step import Step

from ..harness import backdoor
from .losses import Lost, after_loss, until_lost
from .processes import Rank
from .work import Groups, Met, contract_error, filled, group_of, opened, spy_on

if TYPE_CHECKING:
    from hal_core.memory.copies import CopyTicket
    from hal_core.runtime.bound import BoundDevice
    from hal_core.slots.state import SlotState
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

    from ..harness.subject import Recipe

STREAMS = ("the default stream", "a stream of its own", "another stream each time")
TURNS = ("target", "draft", "target", "target", "draft", "draft", "target")
"""The state of each broadcast."""
TYPES = ("uint8", "bool", "float16", "int64", "bfloat16", "uint16", "float64")
"""Of declared fields, of odd widths, so that they do not fill words."""


def fields_of(size: StateConfig) -> list[StateField]:
    """Return declared fields that all ranks share."""
    groups = ("broadcast", "broadcast_speculative") if size.max_draft_tokens else ("broadcast",)
    return [StateField(f"f{at}", dtype, 1 + at % 3, groups=groups[at % len(groups)]) for at, dtype in enumerate(TYPES)]


@dataclass
class InFlight:
    """A rank's view: the bytes of the broadcast's state before and after each, the parts sent, collectives a call."""

    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)
    others: list[tuple[bytes, bytes]] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    error: Met | None = None


def noise_of(nbytes: int, rank: int, turn: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes that a rank writes over a state in a turn."""
    return np.random.default_rng([rank, turn]).integers(0, 256, nbytes, np.uint8)


def in_flight(
    rank: Rank, recipe: Recipe, groups: Groups, sizes: Mapping[int, Mapping[str, StateConfig]], streams: str
) -> InFlight:
    """Broadcast two states by turns and wait for none of it before the end; ``sizes``: of each group's source.

    Before each broadcast the rank writes its own bytes over the whole state, and copies them out before and after it.
    """
    group, seen = group_of(rank, groups), InFlight()
    with opened(recipe) as bound:
        states = {
            name: bound.state(size, name=name, fields=fields_of(size)) for name, size in sizes[group.source].items()
        }
        for state in states.values():
            bound.open_group(state=state, group=group)
        below, stream = spy_on(bound), _first(bound, streams)
        copies: list[list[CopyTicket]] = []
        tickets: list[Ticket] = []

        def every_turn() -> None:
            nonlocal stream
            for turn, name in enumerate(TURNS):
                state, other = states[name], next(one for one in states.values() if one.name != name)
                data = noise_of(state.layout.nbytes, rank.rank, turn)
                backdoor.put(bound.device, state.memory, [(0, data.tobytes())], stream)
                pair = [_copied(bound, state, stream), _copied(bound, other, stream)]
                spied = len(below)
                tickets.append(bound.broadcast_tokens(state=state, group=group, stream=stream))
                seen.collectives.append(len(below) - spied)
                copies.append([*pair, _copied(bound, state, stream), _copied(bound, other, stream)])
                if streams == STREAMS[2]:
                    later = bound.device.stream()
                    later.wait(bound.device.event(stream))
                    stream = later
            for ticket in reversed(tickets):
                ticket.wait(backdoor.PATIENCE)

        seen.error = contract_error(every_turn)
        for before, untouched, after, still in copies if seen.error is None else ():
            for copy in (before, untouched, after, still):
                copy.wait(backdoor.PATIENCE)
            seen.before.append(before.data[0].tobytes())
            seen.after.append(after.data[0].tobytes())
            seen.others.append((untouched.data[0].tobytes(), still.data[0].tobytes()))
    return seen


def _first(bound: BoundDevice, streams: str) -> Stream:
    return bound.default_stream if streams == STREAMS[0] else bound.device.stream()


def _copied(bound: BoundDevice, state: SlotState, stream: Stream) -> CopyTicket:
    return bound.device.copy_out(state.memory, [ByteRange(0, state.layout.nbytes)], stream)


def odd_one(
    rank: Rank, recipe: Recipe, sizes: Sequence[StateConfig], fields: Sequence[Sequence[StateField]]
) -> Met | None:
    """Open a state of this rank's own size and fields in a group of all ranks; return the error of its broadcast."""
    group = group_of(rank, [tuple(range(len(sizes)))])
    with opened(recipe) as bound:
        state = bound.state(sizes[rank.rank], fields=fields[rank.rank])

        def broadcast() -> None:
            bound.broadcast_tokens(state=state, group=group, stream=bound.default_stream).wait(backdoor.PATIENCE)

        return contract_error(broadcast)


@dataclass
class LostInAStep(Lost):
    """The results of a rank whose group lost a member between two steps, and how many steps it has sent."""

    sent: int = 0


def lose_in_a_step(rank: Rank, recipe: Recipe, groups: Groups, victim: int, how: str, well: int = 2) -> LostInAStep:
    """Run steps of which only the output is waited for; ``victim`` kills or stops itself after ``well`` of them."""
    group, sink = group_of(rank, groups), MemorySink()
    with opened(recipe) as bound:
        stream = bound.device.stream()
        state = filled(bound, StateConfig(num_slots=3, max_model_len=600, max_draft_tokens=2, max_logprobs=0))
        other = bound.state(StateConfig(num_slots=4, max_model_len=16), name="other")
        stream.wait(bound.device.event(bound.default_stream))

        def broadcast(of: SlotState) -> None:
            bound.broadcast_tokens(state=of, group=group, stream=stream).wait()

        def one(calls: int) -> None:
            if rank.rank == victim and calls == well:
                os.kill(os.getpid(), signal.SIGKILL if how == "lost" else signal.SIGSTOP)
            bound.broadcast_tokens(state=state, group=group, stream=stream)
            step = Step(calls, {state.name: np.arange(3, dtype=np.int32)}, speculative=True, group=group)
            bound.update_inputs(state=state, step=step, stream=stream)
            saved: Any = bound.save_output(state=state, step=step, sink=sink, stream=stream)
            state.take(saved)

        calls, error = until_lost(one, 20, missed=victim in group.ranks)
        if error is None:
            return LostInAStep(calls, None, sent=len(sink.records))
        lost = after_loss(bound, calls, error, broadcast, state, other)
        return LostInAStep(**{each.name: getattr(lost, each.name) for each in fields(lost)}, sent=len(sink.records))
