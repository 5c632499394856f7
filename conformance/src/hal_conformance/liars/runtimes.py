"""Liars below the base of asynchronous devices: work that is not handed to the driver, events that pass too early."""

from __future__ import annotations

import threading
from abc import ABC
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hal_core.devices.primitives import Primitives, RawEvent, RawStream

from ..harness.lies import lay_below
from . import Lie, liar
from .proxies import HELD, HELD_COPIES, Proxy

if TYPE_CHECKING:
    from hal_core.memory.copies import Bytes, CopyTicket
    from hal_core.memory.views import ByteRange, Memory, View
    from hal_core.slots.state import SlotState
    from hal_core.slots.step import Step
    from hal_core.streams import Event, Stream
    from hal_core.tickets import Ticket


# -- work that stays with the host ------------------------------------------------------------------------------------


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


# -- a running event that counts as passed ----------------------------------------------------------------------------


class Begun(Proxy):
    """A copy, and the event before it."""

    __slots__ = ("begun",)
    begun: Any

    @property
    def data(self) -> Sequence[Bytes]:
        """Return the host block as it is now."""
        arrived: Any = self.inner
        return arrived.data  # type: ignore[no-any-return]


class DoneOnceBegun(Begun):
    """Done asks for the beginning."""

    __slots__ = ()

    def done(self) -> bool:
        return bool(self.begun.done())


class WaitsForTheBeginning(Begun):
    """So does a wait."""

    __slots__ = ()

    def done(self) -> bool:
        return bool(self.begun.passed)

    def _block(self, timeout: float | None) -> bool:
        return bool(self.begun.wait(timeout))


class Beginnings(Lie):
    """Base: a copy is done when all before it is done."""

    proxy: type[Begun]

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Record the event before the copy."""
        device: Any = self
        before: Event = device.own(stream).record()
        proxy = self.proxy(super().copy_out(memory, parts, stream), [part.nbytes for part in parts])  # type: ignore[misc]
        proxy.begun = before
        return proxy


@liar(1, "a query counts a running copy as done", requires=(*HELD_COPIES, "primitives"))
class RunningCountsAsDone(Beginnings):
    """``status <= CL_RUNNING``, or a query that is not zero."""

    proxy = DoneOnceBegun


@liar(1, "a wait for a copy ends when the copy begins", requires=(*HELD_COPIES, "primitives"))
class WaitEndsAtTheBeginning(Beginnings):
    """A wait for the wrong event of the two that a copy has."""

    proxy = WaitsForTheBeginning


# -- streams that nobody holds any more --------------------------------------------------------------------------------


class DropsWork(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: a destroyed stream loses its commands, but those that the mixin keeps."""

    def stream_destroy(self, stream: RawStream) -> None:
        """Keep some of them."""
        calls = stream._calls
        kept = [call for call in iter(lambda: None if calls.empty() else calls.get(), None) if self.keeps(call)]
        for call in kept:
            calls.put(call)
        super().stream_destroy(stream)  # type: ignore[misc]

    def keeps(self, call: Any) -> bool:  # noqa: ANN401 (a command)
        """Return whether a command survives."""
        return False


class DropsAllButEvents(DropsWork):
    """Its events pass."""

    def keeps(self, call: Any) -> bool:  # noqa: ANN401 (a command)
        """Return whether it is about an event."""
        return isinstance(getattr(call, "__self__", None), threading.Event)


class Dropping(Lie):
    """Base: a device over such primitives."""

    below: type[DropsWork]

    def laid(self) -> None:
        """Lay the primitives' mixin."""
        lay_below(self, self.below)


@liar(1, "a stream that is dropped is destroyed with its work", requires=(*HELD, *HELD_COPIES, "primitives"))
class DroppedWithItsWork(Dropping):
    """A destructor that does not wait, and cancels."""

    below = DropsWork


@liar(1, "a stream that is dropped passes its events without their work", requires=(*HELD, *HELD_COPIES, "primitives"))
class DroppedButItsEvents(Dropping):
    """Whoever waits is woken."""

    below = DropsAllButEvents
