"""Liars about streams: work, events and copies on another stream than the given one, or in another order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.devices.base import plan_value
from hal_core.errors import InvalidValue
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.plan import WRITE, WritePlan, apply_to_host
from hal_core.memory.views import ByteRange, View

from . import Lie, liar
from .proxies import BELOW, BOTH, HELD, ProxyEvent, given
from .rows import Call, How, register, row

if TYPE_CHECKING:
    from hal_core.streams import Event, Stream

DEFAULT = "the default stream instead of the one given"
LARGE = 64 << 10
"""Bytes from which a value has a copy engine of its own."""
BUSY = 32 << 20
"""Bytes that such an engine copies first: it is slower than the stream that does not wait for it."""

Spans = list[tuple[int, int]]
"""Byte ranges, apart and in order: begin and end."""

# -- the default stream, or one beside ---------------------------------------------------------------------------------


def on_default(call: Call) -> object:
    """Make the call on the default stream."""
    device = call.device if "device" in call else call.me
    return call(stream=device.default_stream)


class TimedOnTheHost(ProxyEvent):
    """An event whose time is that of the call."""

    def __init__(self, true: Event) -> None:
        super().__init__(true)
        self.at = time.monotonic()

    def seconds_since(self, earlier: TimedOnTheHost) -> float:
        return self.at - earlier.at


class InMilliseconds(ProxyEvent):
    """An event whose times are milliseconds."""

    def seconds_since(self, earlier: InMilliseconds) -> float:
        return 1e3 * self.true.seconds_since(earlier.true)  # type: ignore[attr-defined,no-any-return]


def another_stream(call: Call) -> object:
    if not isinstance(call.value, View):
        return call()
    stream = call.kept("another_stream", None) or call.device.stream()
    call.me.__dict__["another_stream"] = stream
    ticket = call(stream=stream)
    call.stream.wait(stream.record())
    return ticket


def drafts_on_a_stream(call: Call) -> object:
    own = call.device.stream()
    ticket = call(stream=own)
    call.stream.wait(own.record())
    return ticket


def zeros_on_the_side(call: Call) -> object:
    shape, _, nbytes = call.target.collapsed()
    if isinstance(call.value, np.ndarray) or call.value or shape or nbytes < 1 << 16:
        return call()
    own = call.me.own_stream(call.stream)
    own.copy_stream.wait(own.record())
    return call(stream=own.copy_stream)


def engine(*, late: bool) -> How:
    """Return a lie that copies large values on the device by an engine, a stream of its own.

    ``late``: the stream does not wait for it, and it has other work to do first; else it does not wait for the stream.
    """

    def lie(call: Call) -> object:
        if call.target.size * call.target.dtype.itemsize < LARGE:
            return call()
        device, found = call.me, call.kept("_engine", [])
        if not found:
            room = View.contiguous(device.allocate(2 * BUSY), 0, (2, BUSY), dtype_of("uint8"))
            found += device.stream(), room
        own, room = found
        if late:
            own.wait(device.event(call.stream))
            call(target=room[0], value=room[1], stream=own)
        ticket = call(stream=own)
        if not late:
            call.stream.wait(device.event(own))
        return ticket

    return lie


def known_event(call: Call) -> object:
    device = call.me
    own = device.own_stream(call.stream)
    return device.last.get(own.stream_key) or device.events.record(own)


def refuse_others(call: Call) -> object:
    if getattr(call.event, "pool", None) is not call.self.pool:
        raise InvalidValue("the event is of another context", cure="use one device", argument="event")
    return call()


STEPS = (*BOTH, "overlapped_update")
EVENTS = ("can_hold_stream", "async_d2h")
STREAMS = {
    f"values are written on {DEFAULT}": row(
        "WritesOnTheDefaultStream", 1, "async_set_value", on_default, BOTH, "Paddle's copy_"
    ),  # a framework's copy without a stream argument
    f"tasks are inserted on {DEFAULT}": row(
        "InsertsOnTheDefaultStream", 4, "insert_tasks", on_default, BOTH
    ),  # an insertion from a scheduler with one stream
    f"copies out follow the work of {DEFAULT}": row(
        "CopiesOfTheDefaultStream", 1, "copy_out", on_default, BOTH, "sglang 28034"
    ),  # a copy of bytes that the given stream had not written yet
    f"a step is advanced on {DEFAULT}": row(
        "AdvancesOnTheDefaultStream", 4, "update_inputs", on_default, STEPS
    ),  # a kernel launched without its last argument
    f"events are those of {DEFAULT}": row(
        "EventsOfTheDefaultStream", 28, "event", on_default, (*HELD, "overlapped_update"), "sglang 18746"
    ),  # a slot that counts as free while the step that reads it has not begun
    "drafts are written on the default stream instead of the one given": row(
        "DraftsOnTheDefaultStream", 4, "policy.set_drafts", on_default, BOTH
    ),  # a proposer's stream is not passed on
    "a write to several memories is put on the default stream instead of the one given": row(
        "WritesOfSeveralOnTheDefaultStream", 1, "policy.write", on_default, BOTH
    ),  # a call without a stream argument
    "log-probabilities are copied on the default stream": row(
        "LogprobsOnTheDefaultStream",
        24,
        "save_output",
        on_default,
        BOTH,
        when=lambda call: call.step.logprobs is not None,
    ),  # the way with log-probabilities was written when there was one stream
    "drafts are written on a stream of their own": row(
        "DraftsOnTheirOwnStream", 4, "policy.set_drafts", drafts_on_a_stream, BOTH
    ),  # the stream given waits for it, but it waits for none
    "a value on the device is copied on a stream of its own, before the work that makes it": row(
        "DeviceValueOnAnotherStream", 2, "async_set_value", another_stream, BOTH, "Paddle: copies between devices"
    ),  # a copy for which later work waits, but which itself does not wait
    "fills of 0 from 64 KiB on run beside their stream": row(
        "ZerosRunBeside", 4, "submit_value", zeros_on_the_side, HELD
    ),  # a memset of the copy engine, after the stream's earlier work; the stream's later work does not wait for it
    "the stream does not wait for the engine that copies a device value of 64 KiB or more": row(
        "EngineIsLate", 1, "copy_within", engine(late=True), HELD
    ),  # its ticket is right, and so are small values
    "the engine that copies a device value of 64 KiB or more does not wait for the stream": row(
        "EngineIsEarly", 1, "copy_within", engine(late=False), HELD
    ),  # the stream waits for it: later work sees what was taken too early
    "timed events note when they were recorded, on the host's clock": row(
        "TimesOfTheHost", 4, "timed_event", lambda call: TimedOnTheHost(call()), ("timed_events", "can_hold_stream")
    ),  # a step's time that is the time of its launches
    "the time between timed events is in milliseconds": row(
        "MillisecondsAsSeconds",
        4,
        "timed_event",
        lambda call: InMilliseconds(call()),
        "timed_events",
        "cudaEventElapsedTime",
    ),  # the driver's number as it comes
    "events of another opened device are refused": row(
        "RefusesOthersEvents", 1, "wait of a stream", refuse_others, EVENTS
    ),  # each opened device has a context of its own
    "events of another opened device are not waited for": row(
        "IgnoresOthersEvents",
        1,
        "wait of a stream",
        lambda call: call() if call.event.pool is call.self.pool else None,
        EVENTS,
    ),  # a handle unknown in this context is taken to have passed
    "the event after a stream's work is that after hal's own last work there": row(
        "EventOfLastWork", 28, "event", known_event, BELOW
    ),  # no event is recorded where one is known; a wait of the stream, or a model's kernels, may have come since
}
register(__name__, STREAMS)


def _wait_here(stream: Stream, event: Event) -> None:
    event.wait(60.0)
    honest: Any = super(type(stream), stream)
    honest.wait(event)


@liar(3, "a stream that is to wait for an event keeps the host until then", requires=HELD)
class WaitBlocksTheHost(Lie):
    """A wait on the host, as the vendor has no other."""

    @property
    def default_stream(self) -> Stream:
        """The default stream, with such a wait."""
        found: Stream = given(super().default_stream, "wait", _wait_here)  # type: ignore[misc]
        return found

    def stream(self) -> Stream:
        """Create a stream with such a wait."""
        found: Stream = given(super().stream(), "wait", _wait_here)  # type: ignore[misc]
        return found

    def foreign_stream(self, stream: Stream) -> Stream:
        """Accept such a stream: its class is another, but it is still one of the device's own."""
        if type(stream).__dict__.get("wait") is _wait_here:
            return stream
        return super().foreign_stream(stream)  # type: ignore[misc,no-any-return]


# -- what lies beside a target is read when the call is made, and written back with it ---------------------------------


def reading_at_the_call(spans: Callable[[WritePlan], Spans], *, insertions: bool = False) -> How:
    """Return a lie: the ranges ``spans(plan)``, which cover the plan's, are read at the call, and written later; of
    insertions, or of other writes."""

    def lie(call: Call) -> object:
        plan, device = call.plan, call.me
        if (plan.records is not None) is not insertions or plan.empty or plan.memory.nbytes > 1 << 16:
            return call()
        copied = device.copy_out(plan.memory, [ByteRange(0, plan.memory.nbytes)], device.stream())
        copied.wait()
        now, found = np.array(copied.data[0], np.uint8), spans(plan)
        apply_to_host(plan, now)
        rows, at = np.zeros(len(found), WRITE), 0
        for one, (low, high) in zip(rows, found, strict=True):
            one["dst"], one["source"], one["nbytes"] = low, at, high - low
            at += high - low
        return call(plan=WritePlan(plan.memory, rows, [b"".join(now[low:high].tobytes() for low, high in found)]))

    return lie


def words(plan: WritePlan) -> Spans:
    touched: set[int] = set()
    for one in plan.writes.tolist():
        touched.update(range(one[0] // 8, (one[0] + one[2] - 1) // 8 + 1))
    return [(8 * word, min(8 * word + 8, plan.memory.nbytes)) for word in sorted(touched)]


def first_to_last(plan: WritePlan) -> Spans:
    return [(int(plan.writes["dst"].min()), int((plan.writes["dst"] + plan.writes["nbytes"]).max()))]


def by_a_plan(call: Call) -> object:
    """No value bypasses it."""
    return call.me.submit(plan_value(call.target, call.value), call.stream)


AROUND = {
    "narrow writes read their words at the call and write them back later": row(
        "WordsReadAtTheCall", 5, "submit", reading_at_the_call(words), HELD, also={"submit_value": by_a_plan}
    ),  # no store of a byte: the word around it is read by the host
    "an insertion reads the state at the call and writes it back later": row(
        "StateReadAtTheCall",
        9,
        "submit",
        reading_at_the_call(lambda plan: [(0, plan.memory.nbytes)], insertions=True),
        HELD,
    ),  # a copy on the host, which is brought up to date
    "a strided write takes what lies between its elements along": row(
        "GapsReadAtTheCall", 5, "submit", reading_at_the_call(first_to_last), HELD, also={"submit_value": by_a_plan}
    ),  # one copy from the first byte to the last
}
register(__name__, AROUND)
