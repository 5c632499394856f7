"""Liars about what nearly matches, and about counts, threads and memory one step further than a driver was tried at."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from hal_core.memory.views import ByteRange, View

from .proxies import HELD
from .rows import SET, Call, How, register, row, then
from .steps import STOPS

TRANSFER = 4 << 20
"""Bytes of one transfer."""


def stops_of(call: Call) -> list[list[int]]:
    """Return the stop sequences of the step's slot."""
    rows = call.fields["stop_seqs"][call.slot].reshape(-1, call.sizes.max_stop_length)
    count, lengths = int(call.fields["stop_seqs_num"][call.slot, 0]), call.fields["stop_seqs_len"][call.slot]
    return [row[:length].tolist() for row, length in zip(rows[:count], lengths.tolist(), strict=False) if length]


def met_from_its_beginning(stop: Sequence[int], output: Sequence[int]) -> bool:
    """Return whether output ends with a sequence by one pass that begins it again at each mismatch."""
    at = 0
    for token in output:
        at = 0 if at == len(stop) else at
        at = at + 1 if token == stop[at] else int(token == stop[0])
    return at == len(stop)


def without_falling_back(call: Call) -> bool:
    output = call.fields["token_ids"][call.slot][call.total - call.generated : call.total].tolist()
    return bool(call()) and any(met_from_its_beginning(stop, output) for stop in stops_of(call))


def ends_of_stops(call: Call) -> bool:
    output = call.fields["token_ids"][call.slot][call.total - call.generated : call.total].tolist()
    return any(len(stop) <= len(output) and output[-len(stop) :][-64:] == stop[-64:] for stop in stops_of(call))


def is_odd_pair(call: Call) -> bool:
    shape, _, nbytes = call.target.collapsed()
    begin = call.target.memory.address + call.target.bounds()[0]
    is_fill = not isinstance(call.value, View | np.ndarray)
    return is_fill and not shape and (call.target.dtype.itemsize, nbytes, begin % 8) == (4, 8, 4)


def first_element(target: View) -> View:
    return View(target.memory, target.bounds()[0], (1,), (target.dtype.itemsize,), target.dtype)


def even_row(target: View) -> View | None:
    """Return the target as one even row of its runs, if the places of the first two and of the last fit it."""
    offsets, nbytes = target.runs()
    if len(offsets) < 5 or (gap := int(offsets[1] - offsets[0])) <= 0:
        return None
    shape, strides = (len(offsets), nbytes // target.dtype.itemsize), (gap, target.dtype.itemsize)
    fits = int(offsets[-1]) == int(offsets[0]) + (len(offsets) - 1) * gap
    return View(target.memory, int(offsets[0]), shape, strides, target.dtype) if fits else None


def in_an_even_row(call: Call) -> object:
    even = even_row(call.target)
    if even is None or call.value.shape != call.target.shape:
        return call()
    return call(target=even, value=np.ascontiguousarray(call.value).reshape(even.shape))


MATCHES = {
    "a stop sequence is sought in one pass that begins it again at each mismatch": row(
        "StopsWithoutFallingBack", 9, STOPS, without_falling_back
    ),  # an automaton without its failure function
    "of a stop sequence the last 64 tokens are compared": row(
        "SixtyFourStopTokens", 9, STOPS, ends_of_stops
    ),  # a wavefront of threads, a token each
    "of a fill of two words that begins on an odd one the second is left out": row(
        "OddWordsWithoutTail", 6, SET, lambda call: call(target=first_element(call.target)), when=is_odd_pair
    ),  # a head to the boundary, and whole double words
    "elements whose first two places and last one fit an even row are written as one": row(
        "EvenByItsEnds", 5, SET, in_an_even_row, when=lambda call: isinstance(call.value, np.ndarray)
    ),  # a two-dimensional copy
}
register(__name__, MATCHES)

# -- counts ------------------------------------------------------------------------------------------------------------


def ranges_from_the_first(call: Call) -> object:
    parts = list(call.parts)
    return call(parts=[*parts[:8192], *[ByteRange(parts[0].offset, part.nbytes) for part in parts[8192:]]])


def in_transfers(call: Call) -> None:
    runtime = call.me
    for begin in range(0, call.nbytes, TRANSFER):
        nbytes = min(TRANSFER, call.nbytes - begin)
        runtime.copy_in(call.target + begin, call.source + begin, nbytes, call.stream)
        runtime.count("uploads")
    if call.launch is not None:
        runtime.launch(call.launch, call.target, call.stream)
        runtime.count("launches")
    runtime.event_record(call.event, call.stream)


def coming_around(most: int) -> How:
    """Return a lie that makes so many events, and then gives the first again."""

    def lie(call: Call) -> object:
        made: list[Any] = call.kept("_events", [])
        made.append(call() if len(made) < most else made.pop(0))
        return made[-1]

    return lie


COUNTS = {
    "a copy out of more than 8,192 ranges takes the others from the first one's place": row(
        "RangesOfOneCall", 1, "copy_out", ranges_from_the_first, when=lambda call: len(call.parts) > 8192
    ),  # a list of fixed length
    "an upload of more than 4 MiB is several": row(
        "UploadsInTransfers", 10, "primitives.submit", in_transfers, ("fused_scatter", "primitives", "probe_counts")
    ),  # the longest transfer of a copy engine
    "there are 256 timed events: the next one is the first again": row(
        "TimesComeAround", 4, "primitives.event_create_timed", coming_around(256), ("timed_events", "primitives")
    ),  # a table of times
    "seconds of a wait are whole ticks of 10 ms, rounded down": row(
        "WaitsInTicks",
        1,
        "primitives.event_synchronize",
        lambda call: call(timeout=None if call.timeout is None else int(100 * call.timeout) / 100),
        (*HELD, "primitives"),
    ),  # the system's clock
}
register(__name__, COUNTS)

# -- threads, and memory that stays ------------------------------------------------------------------------------------


class Joined:
    """A wait that later threads have joined."""

    def __init__(self) -> None:
        self.over, self.passed = threading.Event(), False


def join_the_first(call: Call) -> bool:
    waits: dict[int, Joined] = call.kept("_joined", {})
    mine = Joined()
    if (first := waits.setdefault(id(call.event), mine)) is not mine:
        return first.over.wait(call.timeout) and first.passed
    try:
        mine.passed = bool(call())
    finally:
        del waits[id(call.event)]
        mine.over.set()
    return mine.passed


OTHERS = {
    "a thread that waits for an event joins the wait of an earlier one, and ends with it": row(
        "WaitsEndTogether", 1, "primitives.event_synchronize", join_the_first, (*HELD, "primitives")
    ),  # one waiter is registered with the driver
    "the device keeps memory for each state that it knew": row(
        "StatesLeaveArguments",
        26,
        "register_state",
        then(lambda call: call.kept("arguments", []).append(call.me.allocate(2048))),
        "primitives",
    ),  # the arguments of a state's kernels, of a list that is emptied at the end
    "memory that another thread drops is not freed": row(
        "FreesInOneThread",
        26,
        "primitives.free",
        lambda call: None,
        "primitives",
        when=lambda call: threading.current_thread() is not threading.main_thread(),
    ),  # the runtime's context is that of the thread that made it
}
register(__name__, OTHERS)
