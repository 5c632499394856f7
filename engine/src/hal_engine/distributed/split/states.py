"""States of a request between a prefill and a decode worker, and all transitions.

Each state ends in bounded time: a wait for a worker ends with that worker, or by a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from hal_core import HalError


class State(Enum):
    """State of a request. The value is its description."""

    WAITING = "waits for a prefill worker with room"
    PREFILLING = "is prefilled; no decode worker has room yet"
    OFFERED = "is prefilled; a decode worker is asked to promise blocks"
    MOVING = "is prefilled; its blocks are sent as they come"
    LANDED = "all blocks have arrived, its first token was not delivered yet"
    HELD = "has its first token; no decode worker has room"
    HELD_OFFERED = "has its first token; a decode worker is asked to promise blocks"
    HELD_MOVING = "has its first token; its blocks are sent"
    INSERTING = "enters the decode worker; the prefill worker keeps the blocks"
    DECODING = "is the decode worker's alone"
    ENDED = "its end was reported, once"


class Event(Enum):
    """Event of a request. The value is its description."""

    PLACED = "a prefill worker has room"
    ASKED = "a decode worker has room, and is asked"
    RESERVED = "all its ranks have promised their blocks"
    ARRIVED = "all its ranks have everything, checked"
    TOKEN = "the record of its first token came"
    INSERTED = "a record of the decode worker names it"
    OFFER_LOST = "the decode worker refused, rejected, took too long or was lost"
    PREFILL_LOST = "the prefill worker was lost"
    DECODE_LOST = "the decode worker was lost"
    GIVEN_UP = "no decode worker had room for too long"
    END = "end token, length, abort, or an error"


S, E = State, Event
TABLE: Mapping[State, Mapping[Event, State]] = {
    S.WAITING: {E.PLACED: S.PREFILLING, E.END: S.ENDED},
    S.PREFILLING: {E.ASKED: S.OFFERED, E.TOKEN: S.HELD, E.PREFILL_LOST: S.WAITING, E.END: S.ENDED},
    S.OFFERED: {
        E.RESERVED: S.MOVING,
        E.TOKEN: S.HELD_OFFERED,
        E.OFFER_LOST: S.PREFILLING,
        E.PREFILL_LOST: S.WAITING,
        E.END: S.ENDED,
    },
    S.MOVING: {
        E.ARRIVED: S.LANDED,
        E.TOKEN: S.HELD_MOVING,
        E.OFFER_LOST: S.PREFILLING,
        E.PREFILL_LOST: S.WAITING,
        E.END: S.ENDED,
    },
    S.LANDED: {E.TOKEN: S.INSERTING, E.OFFER_LOST: S.PREFILLING, E.PREFILL_LOST: S.WAITING, E.END: S.ENDED},
    S.HELD: {E.ASKED: S.HELD_OFFERED, E.GIVEN_UP: S.WAITING, E.PREFILL_LOST: S.WAITING, E.END: S.ENDED},
    S.HELD_OFFERED: {E.RESERVED: S.HELD_MOVING, E.OFFER_LOST: S.HELD, E.PREFILL_LOST: S.WAITING, E.END: S.ENDED},
    S.HELD_MOVING: {E.ARRIVED: S.INSERTING, E.OFFER_LOST: S.HELD, E.PREFILL_LOST: S.WAITING, E.END: S.ENDED},
    S.INSERTING: {E.INSERTED: S.DECODING, E.OFFER_LOST: S.HELD, E.PREFILL_LOST: S.DECODING, E.END: S.ENDED},
    S.DECODING: {E.DECODE_LOST: S.WAITING, E.END: S.ENDED},
    S.ENDED: {},
}

AT_PREFILL = frozenset({S.PREFILLING, S.OFFERED, S.MOVING, S.LANDED})
"""The prefill worker's scheduler has it; its first token was not delivered."""
HELD = frozenset({S.HELD, S.HELD_OFFERED, S.HELD_MOVING})
"""The prefill worker keeps its blocks, and does no other work for it."""
ON_OFFER = frozenset({S.OFFERED, S.MOVING, S.LANDED, S.HELD_OFFERED, S.HELD_MOVING})
"""A decode worker has promised it a slot and blocks."""
AT_DECODE = frozenset({S.INSERTING, S.DECODING})
"""The decode worker's scheduler has it."""


def after(state: State, event: Event) -> State:
    """Return the next state. Raises :class:`HalError` for an event that is not possible there."""
    if (found := TABLE[state].get(event)) is None:
        raise HalError(f"{event.name} in state {state.name}", cure="report it: the table of states forbids it")
    return found
