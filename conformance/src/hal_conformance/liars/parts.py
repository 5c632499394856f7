"""Liars whose event comes between the parts of one call's work: an upload and its launch, the copies of one call."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any, ClassVar

from ..harness.lies import lay_below
from . import Lie, liar
from .proxies import HELD

NEEDS = (*HELD, "async_d2h", "primitives")


class Below(Lie):
    """Base: a device over primitives with the mixin ``below``."""

    below: ClassVar[type]

    def laid(self) -> None:
        """Lay it."""
        lay_below(self, self.below)


class RecordsFirst(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: the event of a submission is recorded between its upload and its launch."""

    before_upload: ClassVar[bool] = False

    def submit(self, source: int, target: int, nbytes: int, launch: Any, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Upload, record, launch; or record first."""
        runtime: Any = self
        if self.before_upload:
            runtime.event_record(event, stream)
        runtime.copy_in(target, source, nbytes, stream)
        runtime.count("uploads")
        if not self.before_upload:
            runtime.event_record(event, stream)
        if launch is not None:
            runtime.launch(launch, target, stream)
            runtime.count("launches")


@liar(1, "the event of a submission is that of its upload", requires=NEEDS)
class EventOfTheUpload(Below):
    """The event that the copy command returned, as the launch returns none."""

    below = RecordsFirst


class RecordsBeforeUploads(RecordsFirst):
    """The same before the upload."""

    before_upload = True


@liar(1, "the event of a submission comes before it", requires=NEEDS)
class EventBeforeTheUpload(Below):
    """A marker that is enqueued first."""

    below = RecordsBeforeUploads


class RecordsBeforeLast(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: the event of several copies is recorded before the last."""

    def submit_copy_out(
        self,
        target: int,
        parts: Sequence[tuple[int, int]],
        after: Any,  # noqa: ANN401 (the runtime's)
        stream: Any,  # noqa: ANN401
        before: Any,  # noqa: ANN401
        event: Any,  # noqa: ANN401
    ) -> None:
        """Wait, copy all but one, record, copy the last."""
        runtime: Any = self
        runtime.event_record(before, after)
        runtime.stream_wait(stream, before)
        for at, (source, nbytes) in enumerate(parts):
            if at == len(parts) - 1:
                runtime.event_record(event, stream)
            if nbytes:
                runtime.copy_out(target, source, nbytes, stream)
                runtime.counts["copies_out"] += 1
            target += nbytes
        if not parts:
            runtime.event_record(event, stream)


@liar(1, "the event of copies out comes before the last of them", requires=NEEDS)
class EventBeforeTheLastCopy(Below):
    """The loop records one turn too early."""

    below = RecordsBeforeLast


class WaitsOnce(ABC):  # noqa: B024 (an ABC for its layout, as Lie)
    """A mixin over primitives: an event is waited for by one stream."""

    def stream_wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401 (the runtime's)
        """Leave out each later wait for what is recorded."""
        waited: dict[int, Any] = self.__dict__.setdefault("_waited", {})
        if id(event) not in waited:
            waited[id(event)] = event
            super().stream_wait(stream, event)  # type: ignore[misc]

    def event_record(self, event: Any, stream: Any) -> None:  # noqa: ANN401
        """It may be waited for once more."""
        self.__dict__.setdefault("_waited", {}).pop(id(event), None)
        super().event_record(event, stream)  # type: ignore[misc]


@liar(28, "a wait for an event is left out if a stream already waits for it", requires=NEEDS)
class WaitsOnceForAnEvent(Below):
    """A flag at the event, where one at each stream is due."""

    below = WaitsOnce


class LargeOvertake(ABC):  # noqa: B024
    """A mixin over primitives: large uploads go by a stream of their own, which waits for nothing."""

    def submit(self, source: int, target: int, nbytes: int, launch: Any, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Upload on the other stream; later work waits for it."""
        runtime: Any = self
        if launch is not None or nbytes < 1 << 16:
            super().submit(source, target, nbytes, launch, stream, event)  # type: ignore[misc]
            return
        if "_side" not in self.__dict__:
            self.__dict__["_side"] = runtime.stream_create()
        side, done = self.__dict__["_side"], runtime.event_create()
        runtime.copy_in(target, source, nbytes, side)
        runtime.count("uploads")
        runtime.event_record(done, side)
        runtime.stream_wait(stream, done)
        runtime.event_record(event, stream)


@liar(4, "an upload of 64 KiB overtakes earlier writes of its stream", requires=NEEDS)
class LargeUploadsOvertake(Below):
    """A copy engine that is not ordered after the compute stream."""

    below = LargeOvertake
