"""Liars below the base of asynchronous devices, in a vendor's primitives: work and events of the runtime."""

from __future__ import annotations

import threading
from abc import ABC
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_core.devices.primitives import Primitives, RawEvent, RawStream

from ..harness.lies import lay_below
from . import Lie, liar
from .proxies import BOTH, HELD
from .rows import Call, How, register, row

if TYPE_CHECKING:
    from hal_core.memory.views import View
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket

# -- the event of a submission, waits for it, and its queue ------------------------------------------------------------


def recorded_first(*, before_upload: bool) -> How:
    """Return a lie that records the event of a submission between its upload and its launch, or before both."""

    def lie(call: Call) -> None:
        runtime = call.me
        if before_upload:
            runtime.event_record(call.event, call.stream)
        runtime.copy_in(call.target, call.source, call.nbytes, call.stream)
        runtime.count("uploads")
        if not before_upload:
            runtime.event_record(call.event, call.stream)
        if call.launch is not None:
            runtime.launch(call.launch, call.target, call.stream)
            runtime.count("launches")

    return lie


def recorded_before_the_last(call: Call) -> None:
    runtime, target, parts = call.me, call.target, call.parts
    runtime.event_record(call.before, call.after)
    runtime.stream_wait(call.stream, call.before)
    for at, (source, nbytes) in enumerate(parts):
        if at == len(parts) - 1:
            runtime.event_record(call.event, call.stream)
        if nbytes:
            runtime.copy_out(target, source, nbytes, call.stream)
            runtime.counts["copies_out"] += 1
        target += nbytes
    if not parts:
        runtime.event_record(call.event, call.stream)


def wait_once(call: Call) -> None:
    waited = call.kept("_waited", {})
    if id(call.event) not in waited:
        waited[id(call.event)] = call.event
        call()


def may_be_waited_for(call: Call) -> object:
    call.kept("_waited", {}).pop(id(call.event), None)
    return call()


def large_overtake(call: Call) -> None:
    runtime = call.me
    if call.launch is not None or call.nbytes < 1 << 16:
        call()
        return
    if "_side" not in runtime.__dict__:
        runtime._side = runtime.stream_create()
    side, done = runtime._side, runtime.event_create()
    runtime.copy_in(call.target, call.source, call.nbytes, side)
    runtime.count("uploads")
    runtime.event_record(done, side)
    runtime.stream_wait(call.stream, done)
    runtime.event_record(call.event, call.stream)


def events_of_a_table(call: Call) -> object:
    made = call.kept("_made", [])
    if len(made) < 4096:
        made.append(call())
        return made[-1]
    made.append(made.pop(0))
    return made[-1]


def keeping(keeps: Callable[[Any], bool]) -> How:
    """Return a lie that destroys a stream with its commands, but those that it keeps."""

    def lie(call: Call) -> object:
        calls = call.stream._calls
        kept = [one for one in iter(lambda: None if calls.empty() else calls.get(), None) if keeps(one)]
        for one in kept:
            calls.put(one)
        return call()

    return lie


ORDERED = (*BOTH, "primitives")
TABLE = {
    "the event of a submission is that of its upload": row(
        "EventOfTheUpload", 1, "primitives.submit", recorded_first(before_upload=False), ORDERED
    ),  # the event that the copy command returned, as the launch returns none
    "the event of a submission comes before it": row(
        "EventBeforeTheUpload", 1, "primitives.submit", recorded_first(before_upload=True), ORDERED
    ),  # a marker that is enqueued first
    "the event of copies out comes before the last of them": row(
        "EventBeforeTheLastCopy", 1, "primitives.submit_copy_out", recorded_before_the_last, ORDERED
    ),  # the loop records one turn too early
    "a wait for an event is left out if a stream already waits for it": row(
        "WaitsOnceForAnEvent",
        28,
        "primitives.stream_wait",
        wait_once,
        ORDERED,
        also={"primitives.event_record": may_be_waited_for},
    ),  # a flag at the event, where one at each stream is due
    "there are 4,096 events: the next one made is the first again": row(
        "EventsComeAround", 1, "primitives.event_create", events_of_a_table, ORDERED
    ),  # a table of the driver's
    "an upload of 64 KiB overtakes earlier writes of its stream": row(
        "LargeUploadsOvertake", 4, "primitives.submit", large_overtake, ORDERED
    ),  # a copy engine that is not ordered after the compute stream
    "a stream that is dropped is destroyed with its work": row(
        "DroppedWithItsWork", 1, "primitives.stream_destroy", keeping(lambda one: False), (*BOTH, "primitives")
    ),  # a destructor that does not wait, and cancels
    "a stream that is dropped passes its events without their work": row(
        "DroppedButItsEvents",
        1,
        "primitives.stream_destroy",
        keeping(lambda one: isinstance(getattr(one, "__self__", None), threading.Event)),
        (*BOTH, "primitives"),
    ),  # whoever waits is woken
}
register(__name__, TABLE)

# -- work that stays with the host -------------------------------------------------------------------------------------


class Unflushed(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """Base: a mixin over primitives. Commands stay in a list of the host until a host thread waits for an event."""

    def put(self, call: Callable[[], object]) -> None:
        """Keep a command."""
        with self.kept[1]:
            self.kept[0].append(call)

    @property
    def kept(self) -> tuple[deque[Callable[[], object]], threading.RLock, Counter[int]]:
        """The commands, their lock, and how many records of each event are among them."""
        found = self.__dict__.get("_kept")
        return found or self.__dict__.setdefault("_kept", (deque(), threading.RLock(), Counter()))  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Hand all commands to the driver."""
        calls, lock, _ = self.kept
        with lock:
            while calls:
                calls.popleft()()

    def copy_in(self, *arguments: object) -> None:
        true = super().copy_in  # type: ignore[misc]
        self.put(lambda: true(*arguments))

    def copy_out(self, *arguments: object) -> None:
        true = super().copy_out  # type: ignore[misc]
        self.put(lambda: true(*arguments))

    def launch(self, *arguments: object) -> None:
        true = super().launch  # type: ignore[misc]
        self.put(lambda: true(*arguments))

    def stream_wait(self, *arguments: object) -> None:
        true = super().stream_wait  # type: ignore[misc]
        self.put(lambda: true(*arguments))

    def event_record(self, event: RawEvent, stream: RawStream) -> None:
        true, pending = super().event_record, self.kept[2]  # type: ignore[misc]

        def record() -> None:
            true(event, stream)
            pending[id(event)] -= 1

        pending[id(event)] += 1
        self.put(record)

    def event_query(self, event: RawEvent) -> bool:
        return not self.kept[2][id(event)] and bool(super().event_query(event))  # type: ignore[misc]

    def event_synchronize(self, event: RawEvent, timeout: float | None) -> bool:
        self.flush()
        return bool(super().event_synchronize(event, timeout))  # type: ignore[misc]

    def stream_destroy(self, stream: RawStream) -> None:
        self.flush()
        super().stream_destroy(stream)  # type: ignore[misc]

    submit = Primitives.submit
    submit_copy_out = Primitives.submit_copy_out


class FlushedButTheLast(Unflushed):
    """All but the newest command is handed over with it."""

    def put(self, call: Callable[[], object]) -> None:
        """Hand over those before it."""
        self.flush()
        super().put(call)


class Flushes(Lie):
    """Base: a device over such primitives. What it puts on a queue past them comes after them."""

    below: type[Unflushed]

    def laid(self) -> None:
        """Lay the primitives' mixin."""
        lay_below(self, self.below)

    @contextmanager
    def hold_stream(self, stream: Stream) -> Iterator[None]:
        """Flush, and hold."""
        me: Any = self
        me.primitives.flush()
        with super().hold_stream(stream):  # type: ignore[misc]
            yield

    def update_inputs(self, state: SlotState, step: Step, stream: Stream) -> Ticket:
        """Flush, and step."""
        me: Any = self
        me.order_after_reads(stream, state.memory)
        me.primitives.flush()
        return super().update_inputs(state, step, stream)  # type: ignore[misc,no-any-return]

    def copy_within(self, target: View, value: View, stream: Stream) -> Ticket:
        """Flush, and copy."""
        me: Any = self
        me.order_after_reads(stream, target.memory)
        me.primitives.flush()
        return super().copy_within(target, value, stream)  # type: ignore[misc,no-any-return]


@liar(3, "work stays in the host's queue until somebody waits for it", requires=(*HELD, "primitives"))
class NeverFlushed(Flushes):
    """No clFlush: a blocking call flushes, a query does not."""

    below = Unflushed


@liar(3, "the last command of a call stays in the host's queue until the next one", requires=(*HELD, "primitives"))
class FlushedBeforeTheLast(Flushes):
    """A flush before the event is recorded, and none after it."""

    below = FlushedButTheLast


# -- locked host memory ------------------------------------------------------------------------------------------------


class InFront:
    """Primitives, but for ``allocate_host`` and ``free_host``."""

    def __init__(self, true: Any, given: Callable[[int, int], int | None]) -> None:  # noqa: ANN401 (the vendor's)
        self._true, self._given = true, given

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (the vendor's)
        return getattr(self._true, name)

    def allocate_host(self, nbytes: int) -> int | None:
        """Something else than the runtime's block, which is lost."""
        return self._given(self._true.allocate_host(nbytes), nbytes)

    def free_host(self, address: int) -> None:
        """Free no block: some blocks are not the runtime's."""


def in_front(given: Callable[[int, int], int | None]) -> How:
    """Return a lie whose primitives give ``given(address, nbytes)`` for a block of host memory."""

    def lie(call: Call) -> None:
        if not isinstance(call.me.primitives, InFront):
            call.me.primitives = InFront(call.me.primitives, given)

    return lie


PAGEABLE: list[np.ndarray[Any, Any]] = []
"""Blocks that liars gave; they live as long as the process."""


def pageable(nbytes: int) -> int:
    """Return the address of aligned host memory that no runtime has locked."""
    PAGEABLE.append(block := np.empty(nbytes + 4096, np.uint8))
    return -(-block.ctypes.data // 4096) * 4096


PINNED = {
    "pinned_host is claimed, and the runtime gives no locked memory": row(
        "PinnedInName", 7, "laid", in_front(lambda address, nbytes: None), ("pinned_host", "primitives")
    ),  # the capability was copied from another plugin
    "locked memory is aligned to 16 bytes": row(
        "PinnedByMalloc", 7, "laid", in_front(lambda address, nbytes: address + 16), ("pinned_host", "primitives")
    ),  # a C library's block, locked afterwards: not where a page or a line begins
    "pinned_host is claimed, and the memory is aligned and pageable": row(
        "PinnedByAlignment", 7, "laid", in_front(lambda _, nbytes: pageable(nbytes)), ("pinned_host", "is_locked")
    ),  # posix_memalign is all that allocate_host() does
    "where locked memory is short, large blocks are pageable": row(
        "PinnedIfSmall",
        7,
        "laid",
        in_front(lambda address, nbytes: address if nbytes < 1 << 16 else pageable(nbytes)),
        ("pinned_host", "is_locked"),
    ),  # a silent way out of the runtime's limit
}
register(__name__, PINNED)
