"""Slot state: one block of device memory laid out by the slot table, with the host's table of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import index
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..errors import InvalidValue, StateUnusable
from ..memory.copies import CopyTicket
from ..memory.plan import SCATTER_MAP, PlanBuilder, WritePlan
from ..memory.views import ByteRange, Memory, View
from .admission import AdmittedRequest, Request, admit
from .batch_admission import AdmittedColumns, admit_all
from .draft_book import DraftBook
from .field_reader import CopiedFields, fields_of
from .fields import CLEANUP_FIELDS, HEADER_BYTES, STATE_TABLE, Field, StateConfig
from .geometry import geometry_of_rows
from .host_table import HostSlotTable, Ints
from .layout import StateLayout, lay_out
from .native_columns import native_of
from .tasks import Task, TaskBatch

if TYPE_CHECKING:
    from ..streams import Event, Stream
    from ..tickets import Ticket

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

ADDRESSABLE = 2**47
"""Bytes that a process can address on x86_64; beyond it, libraries fail in various ways."""
LONGEST_FILL = 1 << 31
"""Bytes that one write resets at most, as a descriptor holds less than 4 GiB; a multiple of 8, the cycle of a fill."""


class StateDevice(Protocol):
    """The part of a device that a state, its groups and outputs use; see :class:`hal_core.contract.device.Device`,
    which is made of these modules and so cannot be imported here."""

    name: str
    index: int

    @property
    def deadline(self) -> float | None:
        """Seconds that a call waits for the device at most; None if no call ever waits for the device."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocate device memory, at least 64-byte aligned; its contents are undefined."""

    def submit(self, plan: WritePlan, stream: Stream) -> Ticket:
        """Write a plan in stream order. The plan's arrays may be changed by the caller once this returns (G2)."""

    def copy_out(self, memory: Memory, parts: Sequence[ByteRange], stream: Stream) -> CopyTicket:
        """Copy byte ranges to the host, as they are after the work that is now on ``stream``.

        Work put on the stream later does not change the copy, and does not wait on the host.
        """

    @property
    def default_stream(self) -> Stream: ...

    def register_state(self, state: SlotState) -> None: ...

    def on_admit(self, state: SlotState, request: AdmittedRequest) -> None: ...

    def on_admit_all(self, state: SlotState, columns: AdmittedColumns) -> None: ...

    def tensor(self, view: View, framework: str = "") -> Any: ...  # noqa: ANN401 (a framework's)


class StepOutput(Protocol[R_co]):
    """The ticket of a step's output: its record, and the copied fields that the record was made of."""

    columns: dict[str, np.ndarray[Any, Any]]

    def record(self) -> R_co: ...


class SlotState:
    """The state of one model in one worker: a worker may hold several, each with its own slot order.

    - ``name``: its name in steps ("target" for the main model).
    - ``speculative``: sized for drafts, so broadcasts carry the speculative slice.
    - ``memory``: the one block of device memory; ``layout`` gives the place of each field in it.
    - ``host_table``: the host's record: the request in each slot, and the lengths of its rows.
    - ``drafts``: the host's record of drafts: after which step they may come, and which slots have some.
    - ``failed``: slot to admission id, of requests that got a token outside the vocabulary: their row was an error, and
      their later tokens are not reported.
    - ``updates``: how often ``update_inputs`` was called; ``channels``: a group's ranks to its broadcast channel
      (G14).
    - ``companions``: states of the same requests in the same memory (:mod:`hal_core.slots.companions`).
    - ``mirror``: field name to array, the output fields as of the last step whose output was taken (G12).
    - ``taker``: the thread that takes steps' output (:meth:`take`), 0 before the first.
    - ``unusable``: why the state must not be used again, "" while it may.
    - ``scatter_map``, ``row_geometry``: the places of a request's record and rows, for plans.

    Views of the fields are device memory: framework operators must not be applied to them.
    """

    def __init__(
        self,
        device: StateDevice,
        sizes: StateConfig,
        *,
        name: str = "target",
        table: Sequence[Field] = STATE_TABLE,
        room: tuple[Memory, int] | None = None,
        same_slots: bool = False,
    ) -> None:
        """``room``: memory of the device for the state, and its offset there; else the state allocates its own.
        ``same_slots``: for a companion, whether its requests have the target's slots.

        :raises InvalidValue: for a name that is empty or no text.
        :raises OutOfMemory: if the device has no room for it.
        """
        if not isinstance(name, str) or not name:
            raise InvalidValue(f"name = {name!r}", cure="give the state the name that steps will use", argument="name")
        self.name, self.sizes, self.device = name, sizes, device
        self.layout = checked_layout(sizes, table, 0 if room is None else room[1])
        self.speculative = sizes.max_draft_tokens > 0
        # First, so that sizes that are too large fail here.
        self.memory = device.allocate(self.layout.nbytes) if room is None else room[0]
        self.companions: tuple[SlotState, ...] = ()
        self.same_slots = same_slots
        self.host_table = HostSlotTable(sizes)
        self.drafts = DraftBook()
        self.failed: dict[int, int] = {}
        self._views: dict[str, View] = {}
        self._output_ranges: dict[bool, ByteRange] = {}  # keyed by whether log-probabilities are included
        self._part_dtypes: dict[ByteRange, np.dtype[np.void]] = {}  # of a part that is copied out
        self.unusable = ""
        self.updates = self.taker = 0
        self.channels: dict[tuple[int, ...], Any] = {}  # see hal_core.ranks.channel.channel_of
        self._readers: list[tuple[Event, Ints | None]] = []
        self.scatter_map = self._make_scatter_map()
        self.row_geometry = geometry_of_rows(self.layout)
        device.register_state(self)
        device.submit(self.reset_plan(), device.default_stream).wait(device.deadline)
        part = self.output_range(topk=False)
        self.mirror = self.columns(np.zeros(part.nbytes, np.uint8), part)

    def view(self, name: str) -> View:
        """Return the view ``[slots, width]`` of a field; the same object each time. Raises for an unknown field."""
        view = self._views.get(name)
        if view is None:
            place = self.layout.place(name)
            shape = (self.sizes.num_slots, place.width)
            view = self._views[name] = View.contiguous(self.memory, place.offset, shape, place.field.dtype, self)
        return view

    def tensor(self, name: str, framework: str = "") -> Any:  # noqa: ANN401 (a framework's tensor)
        """Return a field ``[slots, width]`` as a framework's own tensor over its memory: a model reads it in place.

        It contains the hooks' earlier writes on the stream on which it is read. It keeps the memory alive even when the
        state is dropped and the device closed; later writes into it then have no effect.

        :param framework: "paddle", "torch", "cupy" or "numpy" (on the host); by default the first of them that the
            process has imported.
        :raises InvalidValue: if the field or framework does not exist.
        :raises Unavailable: if the device's memory cannot be that framework's tensor.
        :raises DeviceClosed: after the device was closed.
        """
        return self.device.tensor(self.view(name), framework)

    def reset_plan(self) -> WritePlan:
        """Return a plan that writes every field of every slot to its reset value, and zeroes the headers."""
        builder = PlanBuilder(self.memory)
        for place in self.layout.fields.values():
            value, nbytes = place.field.dtype.storage.type(place.field.reset), place.stride * self.sizes.num_slots
            begins = np.arange(0, nbytes, LONGEST_FILL, dtype=np.int64)
            builder.fill(place.offset + begins, np.minimum(nbytes - begins, LONGEST_FILL), value)
        for header in {*self.layout.headers.values()}:  # groups may share one
            builder.fill(np.array([header.offset], np.int64), HEADER_BYTES, np.uint8(0))
        return builder.build()

    def cleanup_plan(self, slots: Ints) -> WritePlan:
        """Return a plan that zeroes the clean-up fields of ``save_output``, for the slots of a step (G18)."""
        builder = PlanBuilder(self.memory)
        for name in CLEANUP_FIELDS:
            place = self.layout.fields[name]
            offsets = place.offset + slots.astype(np.int64) * place.stride
            builder.fill(offsets, place.stride, place.field.dtype.storage.type(place.field.reset))
        return builder.build()

    def output_range(self, *, topk: bool) -> ByteRange:
        """Return the bytes of the output fields, preceded by the log-probabilities if ``topk``.

        They begin no later than the broadcast slice, so that its header is copied out with them (G14).
        """
        found = self._output_ranges.get(topk)
        if found is None:
            output, alternatives = self.layout.groups["output"], self.layout.groups["output_topk"]
            begin = alternatives.offset if topk else min(output.offset, self.broadcast_range().offset)
            found = self._output_ranges[topk] = ByteRange(begin, output.end - begin)
        return found

    def broadcast_range(self) -> ByteRange:
        """Return the slice that ``broadcast_tokens`` sends, header first; with drafts, for steps of both kinds."""
        return self.layout.groups["broadcast_speculative" if self.speculative else "broadcast"]

    def columns(self, data: np.ndarray[Any, np.dtype[np.uint8]], part: ByteRange) -> dict[str, np.ndarray[Any, Any]]:
        """Return the fields entirely within ``part`` as arrays ``[slots, width]`` over its copied bytes (no copy)."""
        kind = self._dtype_of(part)
        if not kind.names:
            return {}
        record = data[: part.nbytes].view(kind)[0]
        return {name: record[name] for name in kind.names}

    def copied_fields(
        self, data: np.ndarray[Any, np.dtype[np.uint8]], part: ByteRange
    ) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return the same, looked up one by one, for callers that need a few of them."""
        kind = self._dtype_of(part)
        return CopiedFields(data[: part.nbytes].view(kind)[0]) if kind.names else {}

    def _dtype_of(self, part: ByteRange) -> np.dtype[np.void]:
        kind = self._part_dtypes.get(part)
        if kind is None:
            kind = self._part_dtypes[part] = fields_of(self.layout, self.sizes.num_slots, part)
        return kind

    def admit(self, request: Request, *, vocab_size: int | None = None) -> AdmittedRequest:
        """Check a request and pack it for a slot of this state; see :func:`hal_core.admit`. From any thread.

        The device may begin to move its bytes, so that its insertion has less work.
        """
        companions, native = self._own_layouts(), native_of(self.device)
        admitted = admit(request, self.layout, vocab_size=vocab_size, companions=companions, native=native)
        self.device.on_admit(self, admitted)
        return admitted

    def admit_all(
        self, requests: Sequence[Request], *, vocab_size: int | None = None
    ) -> list[AdmittedRequest | InvalidValue]:
        """Admit several requests by one call, in a quarter of the time. From any thread.

        :return: of each, in order, what :meth:`admit` returns, or the error that it raises.
        """
        alone, taken = partial(self.admit, vocab_size=vocab_size), partial(self.device.on_admit_all, self)
        together = not self._own_layouts()
        native = native_of(self.device)
        return admit_all(requests, self.layout, alone, taken, vocab_size=vocab_size, together=together, native=native)

    def batch(self, tasks: TaskBatch | Sequence[Task]) -> TaskBatch:
        """Return the batch of some tasks, made by the device's native code if it has some."""
        return tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks, native_of(self.device))

    def _own_layouts(self) -> list[StateLayout]:
        """The layouts of companions with fields of their own."""
        return [one.layout for one in self.companions if one.layout.config_key != self.layout.config_key]

    def take(self, ticket: StepOutput[R]) -> R:
        """Wait for a step's output, update ``mirror`` to it, and return the record. For the worker's thread.

        :raises InvalidValue: for any ticket but one of this state's ``save_output``; the state is unchanged.
        """
        if getattr(ticket, "_state", None) is not self:
            raise self._not_taken(ticket)
        self.taker = get_ident()
        record = ticket.record()
        self.mirror = {name: ticket.columns[name] for name in self.mirror}
        return record

    def _not_taken(self, ticket: object) -> InvalidValue:
        """Return the error for a ticket that is not of this state's output."""
        other = getattr(ticket, "_state", None)
        what = f"{ticket!r} is no ticket of save_output"
        if isinstance(other, SlotState):
            place = f"{other.device.name}:{other.device.index}"
            what = f"the ticket is of another state's save_output: of {other.name!r} on {place}"
        cure = f"give what save_output returned for this state, {self.name!r}"
        device = f"{self.device.name}:{self.device.index}"
        return InvalidValue(what, cure=cure, device=device, hook="take", argument="ticket")

    def release(self, slots: Sequence[int]) -> None:
        """Declare slots free whose requests have ended; their next request resets their rows.

        Freeing a free slot has no effect. Raises :class:`InvalidValue`, and frees no slot, for an invalid slot.
        """
        try:
            numbers = [index(slot) for slot in slots]
        except TypeError:
            raise InvalidValue(
                f"{slots!r} is not a list of slots", cure="give the numbers of the slots", argument="slots"
            ) from None
        if numbers:
            self.check_slots((min(numbers), max(numbers)), "slots")
        for companion in self.companions:
            live, gone = companion.host_table.live, self.host_table.admission_ids[numbers].tolist()
            companion.release([live[admission_id] for admission_id in gone if admission_id in live])
        self.host_table.release(numbers)
        for slot in numbers:
            self.drafts.holders.pop(slot, None)
            self.failed.pop(slot, None)

    def add_reader(self, slots: Ints | None, event: Event) -> None:
        """Record that work up to ``event`` reads these slots (None: every slot) (G28)."""
        self._readers = [reader for reader in self._readers if not reader[0].done()]
        if not event.done():
            self._readers.append((event, slots))

    def wait_for_readers(self, slots: Ints | None, stream: Stream) -> None:
        """Make ``stream``, and not the host, wait until no step reads these slots (None: any slot) any more (G28)."""
        for event, read in self._readers:
            if (slots is None or read is None or np.isin(slots, read).any()) and not event.done():
                stream.wait(event)

    def wait_for_readers_of_batch(self, tasks: TaskBatch, stream: Stream) -> None:
        """Do the same for the slots of a batch."""
        if self._readers:
            self.wait_for_readers(tasks.slots, stream)

    def check_usable(self) -> None:
        """Raise :class:`StateUnusable` after a disagreement between ranks (G14)."""
        if self.unusable:
            raise StateUnusable(self.unusable, cure="create a new state on every rank", argument="state")

    def mark_unusable(self, why: str) -> None:
        """Refuse every later use of the state, for the reason given."""
        self.unusable = why

    def check_slots(self, span: tuple[int, int], what: str) -> None:
        """Raise :class:`InvalidValue` if the slots, whose lowest and highest are ``span``, do not all exist."""
        if span[0] < 0 or span[1] >= self.sizes.num_slots:
            raise InvalidValue(
                f"{what} names slots {span[0]} to {span[1]} of {self.sizes.num_slots}",
                cure=f"slots go from 0 to {self.sizes.num_slots - 1}",
                argument=what,
            )

    def _make_scatter_map(self) -> np.ndarray[Any, np.dtype[np.void]]:
        """Return the target of each part of a packed record (:data:`hal_core.memory.plan.SCATTER_MAP`)."""
        record = self.layout.record_dtype
        assert record.fields is not None
        places = [self.layout.fields[name] for name in record.fields]
        starts = [entry[1] for entry in record.fields.values()]
        rows = [(p.offset, p.stride, start, p.stride) for p, start in zip(places, starts, strict=True)]
        return np.array(rows, SCATTER_MAP)


def check_sizes(sizes: StateConfig) -> None:
    """Raise :class:`InvalidValue` for anything but a StateConfig."""
    if not isinstance(sizes, StateConfig):
        raise InvalidValue(
            f"{type(sizes).__name__} is not a StateConfig", cure="give StateConfig(num_slots=…, …)", argument="sizes"
        )


def checked_layout(sizes: StateConfig, table: Sequence[Field] = STATE_TABLE, begin: int = 0) -> StateLayout:
    """Return the layout. Raises :class:`InvalidValue` for sizes that fit no machine, before allocating memory."""
    check_sizes(sizes)
    layout = lay_out(sizes, table, begin)
    try:
        fits = layout.nbytes < ADDRESSABLE and layout.admission_dtype.itemsize > 0
    except ValueError:  # NumPy: a record is at most 2 GiB
        fits = False
    if not fits:
        raise InvalidValue(
            f"{sizes} need a state of {layout.nbytes} bytes",
            cure="give fewer slots, or lower the sizes of one request",
            argument="sizes",
        )
    return layout
