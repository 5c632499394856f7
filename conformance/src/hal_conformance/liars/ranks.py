"""Liars among several ranks: the broadcast bytes, their source, the checks, the sender, and absent ranks.

They lie in every rank alike, as every rank opens the liar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from hal_core.errors import GroupLost
from hal_core.group import ALONE, Group
from hal_core.memory.views import ByteRange
from hal_core.tickets import DONE

from ..harness import backdoor
from .rows import Call, How, register, row

RANKS = "several_ranks"
PATIENCE = 60.0
T = TypeVar("T")

# -- the bytes of a broadcast, and their source ------------------------------------------------------------------------


def inside(state: Any) -> list[Any]:  # noqa: ANN401 (a state of slots; the places of fields)
    """Return the fields of the broadcast slice."""
    part = state.broadcast_range()
    return [place for place in state.layout.fields.values() if part.offset <= place.offset < part.end]


def column(state: Any, place: Any) -> ByteRange:  # noqa: ANN401 (a state of slots, a field's place)
    """Return the bytes of a field, of all slots."""
    return ByteRange(place.offset, place.stride * state.sizes.num_slots)


def left_out(parts: Callable[[Any], Sequence[ByteRange]]) -> How:
    """Return a lie: a broadcast does not carry ``parts(state)``, and receivers keep their own bytes there."""

    def lie(call: Call) -> object:
        found = [] if call.group.is_first else [part for part in parts(call.state) if part.nbytes]
        kept = call.device.copy_out(call.state.memory, found, call.stream)
        kept.wait(PATIENCE)
        ticket = call()
        if found:
            runs = [(part.offset, bytes(data)) for part, data in zip(found, kept.data, strict=True)]
            call.write(call.state.memory, *runs)
        return ticket

    return lie


def after_the_last_held(state: Any) -> Sequence[ByteRange]:  # noqa: ANN401
    held = np.flatnonzero(state.host_table.admission_ids)
    end = int(held[-1]) + 1 if len(held) else state.sizes.num_slots  # if no slot is held, everything is sent
    rows = state.sizes.num_slots - end
    return [ByteRange(place.offset + end * place.stride, rows * place.stride) for place in inside(state)]


def after_the_last_sixteen(state: Any) -> Sequence[ByteRange]:  # noqa: ANN401
    part = state.broadcast_range()
    return [ByteRange(part.end - part.nbytes % 16, part.nbytes % 16)]


def flags(state: Any) -> Sequence[ByteRange]:  # noqa: ANN401
    return [column(state, place) for place in inside(state) if place.field.dtype.name == "bool"]


def received(call: Call, parts: Sequence[ByteRange]) -> Sequence[Any]:
    """Return the bytes that have arrived."""
    copied = call.device.copy_out(call.state.memory, parts, call.stream)
    copied.wait(PATIENCE)
    return copied.data  # type: ignore[no-any-return]


def own_samples(call: Call) -> object:
    part = column(call.state, call.state.layout.fields["sampled_token_ids"])
    (kept,) = received(call, [part])
    ticket = call()
    if call.state.speculative and not call.group.is_first:
        ticket.wait(PATIENCE)
        call.write(call.state.memory, (part.offset, bytes(kept)))
    return ticket


def lower_halves(call: Call) -> object:
    ticket = call()
    if not call.group.is_first:
        parts = [column(call.state, place) for place in inside(call.state) if place.field.dtype.name == "int64"]
        words = [np.array(data).view(np.int64).astype(np.int32).astype(np.int64) for data in received(call, parts)]
        runs = [(part.offset, data.tobytes()) for part, data in zip(parts, words, strict=True)]
        call.write(call.state.memory, *runs)
    return ticket


def first_and_last_swapped(call: Call) -> object:
    ticket = call()
    if not call.group.is_first:
        places = inside(call.state)
        ticket.wait(PATIENCE)
        data = [bytes(part) for part in received(call, [ByteRange(place.offset, 1) for place in places])]
        mixed = data[::-1] if data != data[::-1] else [bytes(255 - byte for byte in part) for part in data]
        for place, byte in zip(places, mixed, strict=True):
            call.write(call.state.memory, (place.offset, byte))
    return ticket


def own_header(begin: int, end: int) -> How:
    """Return a lie: receivers write a part of the header themselves, so that it is compared with itself."""

    def lie(call: Call) -> object:
        ticket = call()
        if not call.group.is_first:
            expected = call.state.channels[call.group.ranks].expected[begin:end]
            call.write(call.state.memory, (call.state.broadcast_range().offset + begin, expected))
        return ticket

    return lie


def of_group(ranks: Callable[[Group], Sequence[int]]) -> How:
    """Return a lie: the slice is broadcast in a group of other ranks, or of the same in another order."""

    def lie(call: Call) -> object:
        other = Group(tuple(ranks(call.group)), call.group.rank)
        return call.me.communicator(other).broadcast(call.state.memory, call.state.broadcast_range(), call.stream)

    return lie


def tokens_alone(call: Call) -> object:
    state = call.state
    place = state.layout.fields["accept_tokens" if state.speculative else "sampled_token_ids"]
    begin = state.broadcast_range().offset
    part = ByteRange(begin, place.offset + place.stride * state.sizes.num_slots - begin)
    return call.me.communicator(call.group).broadcast(state.memory, part, call.stream)


def field_by_field(call: Call) -> object:
    part = call.state.broadcast_range()
    begins = [part.offset, *sorted(place.offset for place in inside(call.state))[1:]]
    for begin, end in zip(begins, [*begins[1:], part.end], strict=True):
        communicator = call.me.communicator(call.group)
        ticket = communicator.broadcast(call.state.memory, ByteRange(begin, end - begin), call.stream)
    return ticket


BROADCAST = "broadcast_tokens"
SLICES = {
    "tokens are broadcast, their counts are not": row(
        "TokensWithoutCounts", 13, BROADCAST, tokens_alone, RANKS, "vLLM 44697"
    ),  # a collective that ignores that another rank may have accepted another number
    "a state with drafts sends the fields of verifying steps, and none of a plain step": row(
        "SliceOfTheState", 13, BROADCAST, own_samples, RANKS, "hal"
    ),  # the state's kind instead of the step's: each rank keeps the token that it sampled itself
    "everybody follows the last rank of the group": row(
        "FollowsTheLast", 13, BROADCAST, of_group(lambda group: group.ranks[::-1]), RANKS
    ),  # the wrong end of the list
    "the lowest rank is the source, whoever the group's first is": row(
        "LowestRankIsTheSource", 13, BROADCAST, of_group(lambda group: sorted(group.ranks)), RANKS
    ),  # groups that are sorted like sets
    "one rank packs the fields in another order": row(
        "AnotherOrder", 13, BROADCAST, first_and_last_swapped, RANKS, "vLLM: dictionaries in a broadcast"
    ),  # a right digest, as it is made from the table, with a wrong packing
    "as many rows are broadcast as slots are held: later idle slots keep their values": row(
        "IdleSlotsLeftOut", 13, BROADCAST, left_out(after_the_last_held), RANKS
    ),  # idle slots without tokens, left out
    "the collective moves 16 bytes at a time, and not the rest of the slice": row(
        "RestOfTheSliceLeftOut", 13, BROADCAST, left_out(after_the_last_sixteen), RANKS
    ),  # the last field of the slice ends where it must
    "flags are not broadcast: the collective does not support bool": row(
        "FlagsLeftOut", 13, BROADCAST, left_out(flags), RANKS
    ),  # different stopped requests on the ranks
    "the collective supports only int32, so 64-bit fields are sent as their lower halves": row(
        "LongsAsInts", 13, BROADCAST, lower_halves, RANKS
    ),  # tokens that fit, and larger values that do not
    "the digest of a header is the receiver's own": row(
        "DigestOfTheReceiver", 14, BROADCAST, own_header(32, 64), RANKS
    ),  # a digest that is not sent, as it does not change from step to step
    "the step of a header is the receiver's own": row(
        "StepOfTheReceiver", 14, BROADCAST, own_header(16, 32), RANKS
    ),  # a count per rank
    "a field at a time": row(
        "OneCollectiveAField", 14, BROADCAST, field_by_field, RANKS, "FastDeploy: four broadcasts a step"
    ),  # a header, then each field separately
    "ranks do not compare their configurations": row(
        "NobodyCompares", 14, "comparison of terms", lambda call: [], RANKS
    ),  # an exchange without comparison
    "the header of a slice is not looked at": row(
        "NobodyReads",
        14,
        "check of a broadcast",
        lambda call: call.ticket,
        RANKS,
        "vLLM 29623",
        also={"check of an output's broadcast": lambda call: None},
    ),  # a header that neither the broadcast's ticket nor the output checks
    "a state that ranks disagree about may be used all the same": row(
        "UsesAnything", 14, "use of a state", lambda call: None
    ),  # a missing check
}
register(__name__, SLICES)

# -- absent ranks, groups of one, the sender ---------------------------------------------------------------------------


def wait_for_ever(call: Call) -> object:
    try:
        ticket = call()
        ticket.wait()
    except GroupLost:
        threading.Event().wait()
    return ticket


def lost_once(call: Call) -> object:
    known = call.kept("lost_groups", set())
    if call.group.ranks in known:
        return DONE
    try:
        ticket = call()
        ticket.wait(PATIENCE)
    except GroupLost:
        known.add(call.group.ranks)
        raise
    return ticket


class Meeting:
    """A communicator whose exchange belongs to a lying opening."""

    def __init__(self, true: Any, lossy: Callable[[Callable[[], Any]], Any]) -> None:  # noqa: ANN401
        self._true, self._lossy = true, lossy

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Exchange as the liar does."""
        found: Mapping[int, bytes] = self._lossy(lambda: self._true.exchange(block))
        return found

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (whatever a communicator has)
        return getattr(self._true, name)


def opening(lossy: Callable[[Call, Callable[[], Any]], Any]) -> How:
    """Return a lie about the opening of a group: ``lossy(call, part)`` makes the meeting of ranks, and the exchange."""
    return lambda call: Meeting(lossy(call, call), lambda exchange: lossy(call, exchange))


def never_given_up(call: Call, part: Callable[[], T]) -> T:
    try:
        return part()
    except GroupLost:
        threading.Event().wait()
        raise


def tried_again(call: Call, part: Callable[[], T]) -> T:
    took = call.kept("took", {})
    threading.Event().wait(took.get(call.group.ranks, 0.0))
    began = monotonic()
    try:
        return part()
    except GroupLost:
        took.setdefault(call.group.ranks, monotonic() - began)
        raise


def alone(step: Any) -> Any:  # noqa: ANN401 (a step)
    """Return the step of a group of one."""
    return replace(step, group=ALONE)


def reset_alone(call: Call) -> object:
    if call.group.ranks == (1,):
        place = call.state.layout.fields["step_idx"]
        backdoor.put(call.device, call.state.memory, [(place.offset, np.int64(0).tobytes())], call.stream)
    return call()


GROUPS = {
    "a hung peer is waited for for ever": row(
        "WaitsForEver", 16, BROADCAST, wait_for_ever, RANKS, "gloo, NCCL: the default"
    ),  # a noticed loss without an error
    "the loss of a peer is raised once; after that the source continues alone": row(
        "LossIsToldOnce", 16, BROADCAST, lost_once, RANKS
    ),  # a discarded communicator, and a group without one that communicates nothing
    "the opening of a group waits for a peer that never comes": row(
        "OpeningWaitsForEver", 16, "communicator", opening(never_given_up), RANKS
    ),  # a timeout of collectives that does not cover the opening
    "a group whose opening was lost is opened again at each call, which waits again": row(
        "OpeningTriedAgain", 16, "communicator", opening(tried_again), RANKS
    ),  # an opening that remembers only its successes
    "a group of one opens a communicator and broadcasts to itself": row(
        "TalksToItself",
        15,
        "policy.broadcast_tokens",
        lambda call: call.hooks.broadcast_tokens(
            device=call.device, state=call.state, group=call.group, stream=call.stream
        ),
    ),  # an unchecked group size
    "a group of one that is not rank 0 resets fields that it must not change": row(
        "ReceivesFromNobody", 15, "policy.broadcast_tokens", reset_alone, RANKS
    ),  # every rank but 0 as a receiver
    "rank 1 sends too, once it has the tokens": row(
        "SendsWhatItReceived",
        17,
        "policy.save_output",
        lambda call: call(step=alone(call.step)) if call.state.channels else call(),
        RANKS,
        "FastDeploy 7172",
    ),  # tokens sent by every rank, as all have them after a broadcast
    "rank 1 sends too": row(
        "EveryRankSends", 17, "policy.save_output", lambda call: call(step=alone(call.step)), seen="FastDeploy 7172"
    ),  # a rank that considers itself the first
}
register(__name__, GROUPS)
