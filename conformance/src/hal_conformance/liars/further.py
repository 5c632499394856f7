"""Liars that one test of each kind does not find: at a size further, of near misses, and with two of each."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.errors import OutOfMemory
from hal_core.memory.copies import HostCopy
from hal_core.memory.plan import WritePlan
from hal_core.memory.views import ByteRange, View
from hal_core.slots.layout import REQUEST_ROW
from hal_core.slots.tasks import LEAVING, TaskKind
from hal_core.tickets import DONE

from .proxies import HELD, HELD_COPIES, RING, EventTicket, ProxyEvent, given
from .rows import SET, Call, first, meanwhile, register, row, then
from .sizes import COUNTED, LARGE, by_so_many, other_requests_records, places_of_dynamic, records, some
from .steps import STOPS

if TYPE_CHECKING:
    from hal_core.streams import Event

# -- one size further --------------------------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None)
MANY = 1024
"""Places of a pool, requests of a block of threads, calls of a queue."""


def without_the_last_piece(call: Call) -> object:
    shape, _, nbytes = call.target.collapsed()
    if isinstance(call.value, View) or np.ndim(call.value) or shape or nbytes < 8 << 20:
        return call()
    count = nbytes // call.target.dtype.itemsize
    flat = View.contiguous(call.target.memory, call.target.offset, (count,), call.target.dtype, call.target.owner)
    return call(target=flat[: count - 512])


def done_once_begun(call: Call) -> object:
    if not isinstance(call.value, np.ndarray) or call.value.nbytes < LARGE:
        return call()
    begun = call.device.event(call.stream)
    call()
    return EventTicket(begun)


def refuse_what_is_queued(call: Call) -> object:
    pending = call.kept("pending", {}).setdefault(call.stream.handle, [])
    pending[:] = [ticket for ticket in pending if not ticket.done()] if len(pending) >= MANY else pending
    ticket = call()
    pending.append(ticket)
    if len(pending) > MANY:
        time.sleep(call.me.staging.deadline)
        raise OutOfMemory("the launch queue stayed full", cure="give less at once", argument="ring")
    return ticket


def reuse_the_arrays(call: Call) -> object:
    copy, pool = call(), call.kept("pool", [])
    if sum(part.nbytes for part in call.parts) > 4096:
        return copy
    pool.append(copy)
    if len(pool) > MANY:
        for array in pool.pop(0).data:
            array[...] = 0xEE
    return copy


def of_no_bytes(call: Call) -> object:
    if any(part.nbytes for part in call.parts):
        return call()
    return HostCopy([np.zeros(0, np.uint8) for _ in call.parts])


def ring_for_each(call: Call) -> None:
    for _ in range(call.launch.packed.records):
        time.monotonic()


def admitted(call: Call) -> list[int]:
    return [request.admission_id for request in call.tasks.requests]


def low_slots(call: Call) -> object:
    """Step as if the slots whose tokens lie past 2 GiB had stopped."""
    state, place = call.state, call.state.layout.fields["token_ids"]
    far = [slot for slot in range(state.sizes.num_slots) if (place.offset + slot * place.stride) >> 31]
    if not far:
        return call()
    begin = state.layout.fields["stop_flags"].offset
    copied = call.me.copy_out(state.memory, [ByteRange(begin + far[0], len(far))], call.stream)
    copied.wait()
    call.write(state.memory, (begin + far[0], bytes([1]) * len(far)))
    call()
    return call.write(state.memory, (begin + far[0], copied.data[0].tobytes()))


SIZES = {
    "a fill of 8 MiB or more is made in pieces, without the last one": row(
        "FillsInPieces", 6, SET, without_the_last_piece
    ),  # a count of pieces that is rounded down
    "an upload of a megabyte is done once it has begun": row(
        "UploadDoneOnceBegun", 1, SET, done_once_begun, ("async_h2d", *HELD_COPIES)
    ),  # the event is recorded before the copy; a held stream shows nothing, as both wait
    "a call that finds 1,024 pending on its stream is refused, and queued": row(
        "RefusedAndQueued", 3, SET, refuse_what_is_queued, RING
    ),  # the error of the event after the copy
    "a batch has at most 1,024 requests": row(
        "ThousandRequests", 9, "submit", records(lambda found: some(found, None, MANY))
    ),  # one block of threads, a request each
    "one submission for each 1,024 requests of a batch": row(
        "SubmitsByThousand", 10, "submit", by_so_many(MANY), COUNTED
    ),  # a table of fixed length
    "arrays of the last 1,024 small copies are those of a pool": row(
        "PoolOfArrays", 1, "copy_out", reuse_the_arrays
    ),  # whether somebody has them or not
    "a copy of no bytes is done, whatever is before it": row(
        "EmptyCopiesAreDone", 1, "copy_out", of_no_bytes, HELD_COPIES
    ),  # an early return
    "a launch rings the driver once for each request, past all counts": row(
        "RingsForEachRequest", 10, "primitives.launch", first(ring_for_each), COUNTED
    ),  # doorbells of a queue that takes one packet each
    "a request that was admitted leaves 2 KiB until it is inserted": row(
        "KeepsTheAdmitted",
        26,
        "on_admit",
        first(lambda call: call.kept("ahead", {}).setdefault(call.request.admission_id, bytearray(2048))),
        also={"insert_tasks": first(lambda call: [call.kept("ahead", {}).pop(one, None) for one in admitted(call)])},
    ),  # staged bytes of requests that are cancelled before they enter
    "each write of a value leaves 256 bytes below Python": row(
        "LosesBelowPython", 26, SET, first(lambda call: LIBC.malloc(256))
    ),  # an object of a library, of which neither Python nor the plugin has a count
    "a step leaves out slots whose tokens lie past 2 GiB": row(
        "StepsInThirtyOneBits", 9, "update_inputs", low_slots
    ),  # an int, and a check of bounds
}
register(__name__, SIZES)

# -- near misses -------------------------------------------------------------------------------------------------------


def but_known_heads(call: Call) -> object:
    flat = call.plan.flat()
    if call.plan.memory.nbytes >> 24 or not len(flat.writes):
        return call()
    heads, payload, kept = call.kept("heads", {}), bytes(flat.payload), []
    for at, (dst, source, nbytes, *_) in enumerate(flat.writes.tolist()):
        place, head = (flat.memory.address, dst, nbytes), payload[source : source + 64]
        same = nbytes >= 128 and flat.writes["pattern_bytes"][at] == 0 and heads.get(place) == head
        heads[place] = head
        kept += [] if same else [at]
    return call(plan=WritePlan(flat.memory, flat.writes[kept], flat.pieces))


def staged(record_of: Callable[[Call, Any, int], bytes | None]) -> Any:  # noqa: ANN401 (a lie)
    """Return a lie: new requests of a batch get the records of :data:`record_of`, where they fit."""

    def lie(call: Call) -> tuple[Any, str, object]:
        wrong, plain = dict[int, bytes](), call.tasks.plain
        for kind, slot, request in zip(plain["kinds"], plain["slots"], call.tasks.requests, strict=True):
            packed = record_of(call, request, slot)
            if kind == TaskKind.PREFILL and packed is not None and len(packed) == len(request.packed):
                wrong[slot] = packed[REQUEST_ROW.itemsize :]
        return call.me, "wrong", (wrong, places_of_dynamic(call))

    return meanwhile(lie)


def note_the_name(call: Call) -> None:
    call.kept("names", {}).setdefault((id(call.state), call.request.request_id), call.request.packed)


def penalties_of_the_former(call: Call, request: Any, slot: int) -> bytes | None:  # noqa: ANN401 (an admitted one)
    """Return its record with the penalties of the slot's former request, while an output is pending."""
    pending, slots = call.kept("outputs", []), call.kept("former", {})
    pending[:] = [ticket for ticket in pending if not ticket.done()]
    former, slots[id(call.state), slot] = slots.get((id(call.state), slot)), request.packed
    if not pending or former is None or len(former) != len(request.packed):
        return None
    packed, fields = bytearray(request.packed), call.state.layout.record_dtype.fields
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        at = REQUEST_ROW.itemsize + fields[name][1]
        packed[at : at + 4] = former[at : at + 4]
    return bytes(packed)


def prefix_leaves(call: Call) -> object:
    """Take the first blocks of requests that leave out of every slot's table."""
    state, plain, place = call.state, call.tasks.plain, call.state.layout.fields["block_tables"]
    gone = [slot for kind, slot in zip(plain["kinds"], plain["slots"], strict=True) if kind in LEAVING]
    if not gone or place.stride > 1 << 10:
        return call()
    part, tables = ByteRange(place.offset, place.stride * state.sizes.num_slots), list[Any]()
    for turn in range(2):
        ticket = call() if turn else None
        copied = call.me.copy_out(state.memory, [part], call.stream)
        copied.wait()
        tables.append(np.array(copied.data[0]).view(np.int32).reshape(state.sizes.num_slots, -1))
    tables[1][np.isin(tables[1][:, 0], tables[0][gone, 0]), 0] = -1
    call.write(state.memory, (part.offset, tables[1].tobytes()))
    return ticket


def compared(alike: Callable[[Any, Any], object]) -> Any:  # noqa: ANN401 (a lie)
    """Return a lie: output ends with a stop sequence of more than 16 tokens that is ``alike`` to it."""

    def lie(call: Call) -> object:
        fields, slot, total = call.fields, call.slot, call.total
        sequences = fields["stop_seqs"][slot].reshape(-1, call.sizes.max_stop_length)
        for at in range(int(fields["stop_seqs_num"][slot, 0])):
            length = int(fields["stop_seqs_len"][slot, at])
            tail = fields["token_ids"][slot, total - length : total]
            if 16 < length <= call.generated and alike(tail, sequences[at, :length]):
                return True
        return call()

    return lie


def as_it_lies(call: Call) -> object:
    value, target = call.value, call.target
    steps = [abs(step) for step in value.strides] if isinstance(value, View) else []
    if value.shape == target.shape or steps == sorted(steps, reverse=True):
        return call()
    return call(value=View.contiguous(value.memory, value.bounds()[0], target.shape, value.dtype, value.owner))


def place_of(view: View) -> tuple[object, ...]:
    return view.memory.address, view.offset, view.shape, view.strides


def but_the_same_again(call: Call) -> object:
    """Host values are known by their bytes, values on the device by their place; the other kind is not noticed."""
    value, of_device = call.value, isinstance(call.value, View)
    now = place_of(call.target), place_of(value) if of_device else (np.ndim(value), np.asarray(value).tobytes())
    if call.kept("last", {}).get(of_device) == now:
        return DONE
    ticket = call()
    call.kept("last", {})[of_device] = now
    return ticket


def by_its_address(call: Call) -> object:
    if not isinstance(call.value, np.ndarray) or call.value.nbytes > 4096:
        return call()
    _, known = call.kept("arrays", {}).setdefault(call.value.ctypes.data, (call.value, call.value.copy()))
    return call(value=known.reshape(call.target.shape) if known.size == call.target.size else call.value)


NEAR = {
    "a value that equals the last one of its place is not written again, nor copied from where the last one was": row(
        "TheSameIsLeftOut",
        4,
        SET,
        but_the_same_again,
        also={"submit": first(lambda call: call.kept("last", {}).clear())},
    ),  # hooks are noticed, copies within the device, steps and what changes their source are not
    "an array that is given again is what it was at first": row(
        "ArraysKnownByAddress", 4, SET, by_its_address
    ),  # staged bytes are kept by the array's address
    "a row whose first 64 bytes are those last written to its place is left out": row(
        "RowsKnownByTheirHead", 11, "submit", but_known_heads
    ),  # uploads of what has changed alone
    "a request is staged by its name: another one of the name gets what was kept": row(
        "StagedByName",
        9,
        "insert_tasks",
        staged(lambda call, request, _: call.me.__dict__.get("names", {}).get((id(call.state), request.request_id))),
        also={"on_admit": then(note_the_name), "submit": other_requests_records},
    ),  # a name is taken for an identity
    "a request that enters while an output is pending gets its slot's former penalties": row(
        "PenaltiesOfTheFormer",
        9,
        "insert_tasks",
        staged(penalties_of_the_former),
        seen="vLLM 27878",
        also={
            "save_output": lambda call: (ticket := call(), call.kept("outputs", []).append(ticket))[0],
            "submit": other_requests_records,
        },
    ),  # a copy of the penalties for each batch, which overlap makes a step late
    "the first block of a request that leaves is taken out of every slot": row(
        "PrefixLeavesWithOne", 9, "insert_tasks", prefix_leaves
    ),  # blocks without a count of their users
    "long stop sequences are compared by their last 16 tokens": row(
        "StopsByTheirTail", 9, STOPS, compared(lambda tail, sequence: (tail[-16:] == sequence[-16:]).all())
    ),  # a vector's worth
    "long stop sequences are compared by the sum of their tokens": row(
        "StopsByTheirSum", 9, STOPS, compared(lambda tail, sequence: tail.sum() == sequence.sum())
    ),  # a hash that does not know places
    "a device value of another shape is taken as it lies, whatever its strides": row(
        "TurnedValuesAsTheyLie", 6, SET, as_it_lies
    ),  # reshape() of a tensor taken for contiguous
}
register(__name__, NEAR)

# -- two of each -------------------------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {}
"""What every opened device uses."""
MEETING = 1e-3
"""Seconds between the two halves of an unlocked change, so that two threads of a loaded machine meet there."""


def in_one_buffer(call: Call) -> None:
    call.me.__dict__["buffer"] = call.request
    time.sleep(MEETING)
    call.kept("taken", {})[call.request.admission_id] = call.me.__dict__["buffer"].packed


def as_the_known_one(event: Any) -> bool:  # noqa: ANN401 (an honest event)
    lied, known = SHARED["answers"]
    return bool(super(type(event), event).done()) or (lied is event and known.done())


def by_handle_0(call: Call) -> object:
    event = call()
    if call.stream is not call.me.default_stream:
        return event
    owner, known = SHARED.get("event", (id(call.me), event))
    SHARED["event"] = id(call.me), event
    if owner != id(call.me):
        SHARED["answers"] = given(event, "done", as_the_known_one), known
    return event


def in_one_scratch(call: Call) -> object:
    if not isinstance(call.value, np.ndarray):
        return call()
    SHARED["scratch"] = call.value
    time.sleep(MEETING)
    return call(value=SHARED["scratch"])


class OfItsStream(ProxyEvent):
    """A timed event whose time begins with its stream's first one."""

    def __init__(self, true: Event, first_one: Any) -> None:  # noqa: ANN401 (an honest timed event)
        super().__init__(true)
        self.first_one = first_one

    def seconds_since(self, earlier: OfItsStream) -> float:
        mine: Any = self.true
        own = mine.seconds_since(self.first_one) if mine is not self.first_one else 0.0
        theirs: Any = earlier.true
        return float(own - (theirs.seconds_since(earlier.first_one) if theirs is not earlier.first_one else 0.0))


class WhenRead(ProxyEvent):
    """A timed event of the host's time when it is first found to have passed."""

    def done(self) -> bool:
        passed = self.true.done()
        if passed:
            self.__dict__.setdefault("stamp", time.monotonic())
        return passed

    def wait(self, timeout: float | None = None) -> bool:
        return self.true.wait(timeout) and self.done()

    def seconds_since(self, earlier: WhenRead) -> float:
        passed = earlier.done() and self.done()
        return float(self.__dict__["stamp"] - earlier.__dict__["stamp"]) if passed else 0.0


def since_its_first(call: Call) -> object:
    event, firsts = call(), call.kept("firsts", {})
    return OfItsStream(event, firsts.setdefault(call.stream.handle, event))


TWO: Mapping[str, Any] = {
    "requests are staged in one buffer as they are admitted, whichever thread admits": row(
        "OneAdmissionBuffer",
        9,
        "insert_tasks",
        staged(lambda call, request, _: call.me.__dict__.get("taken", {}).get(request.admission_id)),
        also={"on_admit": first(in_one_buffer), "submit": other_requests_records},
    ),  # there was one thread when it was written
    "the last event of a default stream is known by its handle, which is 0 on each opened device": row(
        "EventsByHandle", 1, "event", by_handle_0, (*HELD, *HELD_COPIES)
    ),  # a table of the class
    "values of two opened devices go by one scratch buffer": row(
        "ScratchOfTheClass", 4, SET, in_one_scratch
    ),  # a module's variable
    "a timed event notes its time when it is first read": row(
        "TimedWhenRead", 4, "timed_event", lambda call: WhenRead(call()), "timed_events"
    ),  # the runtime's events have no time of their own
    "the time of a timed event begins with its stream's first": row(
        "TimesOfEachStream", 4, "timed_event", since_its_first, ("timed_events", "can_hold_stream")
    ),  # right for two events of one stream
}
register(__name__, TWO)
