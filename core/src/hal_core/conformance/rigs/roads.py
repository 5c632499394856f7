"""Every road by which work reaches a stream: each hook in several forms, ``advance`` and a plan by itself.

A :class:`Road` is made ready before anything is held. Then :meth:`Road.act` puts its one call on a stream, and
:meth:`Road.wrong` says how bytes that were read after it differ from what they must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...devices.base import DeviceBase
from ...group import Group
from ...memory.dtypes import dtype_of
from ...memory.plan import PlanBuilder
from ...memory.views import View
from ...output.ticket import OutputTicket
from ...slots.admission import Request, SamplingParams
from ...slots.fields import HEADER_BYTES, Sizes, SplitRole
from ...slots.tasks import Task, TaskKind
from ..harness import backdoor
from ..harness.asserts import assert_no_error
from ..harness.backdoor import Bytes, arrive
from ..harness.lies import Lie
from ..harness.sinks import KeepingSink
from ..kit import Kit
from ..oracle.slots import difference
from .rig import Rig, assert_rows

if TYPE_CHECKING:
    from ...memory.views import ByteRange, Memory
    from ...streams import Stream
    from ...tickets import Ticket


@dataclass
class Road:
    """One call, ready to be made.

    - ``memory``: what it changes; ``before``: the bytes that must be there first.
    - ``sources``: other device memory that it reads, with the bytes that must be there first.
    - ``act``: makes the call on a stream, and tells the model.
    - ``wrong``: what is wrong with the bytes read after it, or "".
    - ``settle``: waits for the ticket, and looks at what came of it besides the bytes.
    - ``after``: the bytes that it leaves, where they are known beforehand.
    """

    memory: Memory
    before: Bytes
    act: Callable[[Stream], Ticket]
    wrong: Callable[[Bytes], str]
    sources: Sequence[tuple[Memory, Bytes]] = ()
    settle: Callable[[Ticket], None] = field(default=lambda ticket: arrive(ticket, "the call"))
    after: Bytes | None = None


Make = Callable[[Kit], Road]


def noise(nbytes: int, seed: int) -> Bytes:
    """Bytes that are told from any others."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def unlike(got: Bytes, should: Bytes) -> str:
    """Where bytes differ, or ""."""
    wrong = np.flatnonzero(got != should)
    if not len(wrong):
        return ""
    at = int(wrong[0])
    return (
        f"{len(wrong)} of {len(should)} bytes are wrong, the first is byte {at}: {got[at]:#04x}, not {should[at]:#04x}"
    )


# -- async_set_value --------------------------------------------------------------------------------------------------

SHAPE = (64, 96)
_ALL = slice(None)


@dataclass(frozen=True)
class Value:
    """A form of ``async_set_value``: a part of an array of ``shape``, and what is written there.

    ``value``: "scalar", "array", "list", "device" (a view of other memory) or an index (a view of the same memory).
    """

    part: tuple[int | slice, ...]
    value: str | tuple[slice, ...]
    dtype: str = "int64"
    shape: tuple[int, ...] = SHAPE

    def road(self, kit: Kit, memory: Memory | None = None, before: Bytes | None = None, seed: int = 1) -> Road:
        """Make it ready, on memory of its own unless some is given."""
        dtype = dtype_of(self.dtype)
        nbytes = int(np.prod(self.shape)) * dtype.itemsize
        memory = kit.device.allocate(nbytes) if memory is None else memory
        before = noise(nbytes, seed) if before is None else before
        after, sources = before.copy(), []
        whole = View.contiguous(memory, 0, self.shape, dtype)
        target, cells = whole[self.part], after.view(dtype.storage).reshape(self.shape)
        items = noise(max(target.size, 1) * dtype.itemsize, seed + 1000).view(dtype.storage)
        value: Any
        if self.value == "scalar":
            value = items[0].item()
            cells[self.part] = value
        elif self.value == "device":
            value = View.contiguous(kit.device.allocate(items.nbytes), 0, target.shape, dtype)
            sources.append((value.memory, items.view(np.uint8)))
            cells[self.part] = items.reshape(target.shape)
        elif isinstance(self.value, tuple):
            value = whole[self.value]
            cells[self.part] = cells[self.value].copy()
        else:
            value = items.reshape(target.shape)
            cells[self.part] = value
            value = value.tolist() if self.value == "list" else value

        def act(stream: Stream) -> Ticket:
            ticket = kit.bound.async_set_value(target=target, value=value, stream=stream)
            if isinstance(value, np.ndarray):
                value[...] = 0  # it is the caller's again (G2)
            return ticket

        return Road(memory, before, act, lambda got: unlike(got, after), sources, after=after)


VALUES: dict[str, Value] = {
    "one element": Value((3, 5), "scalar"),
    "a scalar that fills a row": Value((3,), "scalar"),
    "a scalar in a strided part": Value((slice(None, None, 2), slice(1, None, 3)), "scalar"),
    "a list": Value((0, slice(8, 16)), "list"),
    "a short array": Value((1, slice(8, 20)), "array"),
    "a long array": Value((slice(0, 60),), "array"),
    "a strided array": Value((slice(None, None, -2), slice(3, None, 7)), "array"),
    "a column of int32": Value((_ALL, 4), "array", "int32"),
    "a value on the device": Value((slice(10, 20),), "device"),
    "a strided value on the device": Value((slice(10, 20), slice(None, None, -5)), "device"),
    "a value of the same memory": Value((slice(0, 20),), (slice(10, 30),)),
}
"""Told to form. All fit a staging ring of a few MiB many times over."""

LARGE = Value((_ALL, slice(1, None)), "array", shape=(50, 1536))
"""600 KB that are not contiguous on the device."""


# -- hooks on a state -------------------------------------------------------------------------------------------------

SIZES = Sizes(slots=6, max_tokens=24, block_size=2, max_draft=2, top_k=1, max_stop_sequences=2, max_bad_words=2)
RICH = SamplingParams(0.5, 3, 0.9, 0.1, 7, 1.1, 0.2, 0.3, 1, 9, ((1, 2), (3,)), (4, 5), (6,), 1)


def new_tasks(rig: Rig, slots: Sequence[int]) -> list[Task]:
    """A new request for each slot, with another prompt in each."""
    found = []
    for slot in slots:
        prompt = [100 * slot + 1, 100 * slot + 2, 100 * slot + 3]
        request = rig.admit(Request(rig.new_name(), prompt, RICH if slot % 2 else SamplingParams(max_tokens=9)))
        found.append(Task(TaskKind.PREFILL, slot, request, 0, 3, [2 * slot, 2 * slot + 1]))
    return found


def of_state(rig: Rig, call: Callable[[], Ticket], settle: Callable[[Ticket], None] | None = None) -> Road:
    """The road of a call that a rig makes on its stream."""

    def act(stream: Stream) -> Ticket:
        rig.stream = stream
        return call()

    road = Road(rig.state.memory, rig.model.block.copy(), act, lambda got: difference(rig.model, got))
    road.settle = settle or road.settle
    return road


def inserting(slots: Sequence[int]) -> Make:
    """New requests enter an empty state."""

    def make(kit: Kit) -> Road:
        rig = Rig(kit, SIZES)
        tasks = new_tasks(rig, slots)
        return of_state(rig, lambda: rig.insert(tasks))

    return make


def filled(kit: Kit, slots: Sequence[int] = range(6)) -> tuple[Rig, list[Task]]:
    """A state with a request in each of the slots, whose first tokens are sampled."""
    rig = Rig(kit, SIZES)
    tasks = new_tasks(rig, slots)
    arrive(rig.insert(tasks))
    n, most = SIZES.slots, SIZES.max_accept
    accepted = 10 + np.arange(n * most, dtype=np.int64)
    counts = np.array([1 + slot % most for slot in range(n)], np.int32)
    arrive(rig.poke({"sampled_token_ids": 50 + np.arange(n), "accept_tokens": accepted, "accept_num": counts}))
    return rig, tasks


def changing(kit: Kit) -> Road:
    """Requests leave, one enters at once, one is handed over, and one gets more blocks."""
    rig, tasks = filled(kit, range(5))
    (again,) = new_tasks(rig, [1])
    handed = rig.admit(Request(rig.new_name(), [7, 8], SamplingParams(max_tokens=9), role=SplitRole.DECODE))
    batch = [
        Task(TaskKind.PREEMPTED, 0, tasks[0].request),
        Task(TaskKind.ABORTED, 1, tasks[1].request),
        again,
        Task(TaskKind.DECODE, 2, tasks[2].request, blocks=[77], first_block=2),
        Task(TaskKind.HANDOFF, 5, handed, 2, blocks=[3, 4], first_token=9, drafts=[1, 2]),
    ]
    return of_state(rig, lambda: rig.insert(batch))


def advancing(*, speculative: bool) -> Make:
    """A step over every slot."""

    def make(kit: Kit) -> Road:
        rig, _ = filled(kit)
        step = rig.step([4, 0, 2, 5, 1, 3], speculative=speculative)
        return of_state(rig, lambda: rig.advance(step))

    return make


def drafting(kit: Kit) -> Road:
    """Drafts after a step: as many as fit, one, none; a slot whose request has left gets none."""
    rig, tasks = filled(kit)
    arrive(rig.advance(rig.step([4, 0, 2, 5, 1, 3], speculative=True)))
    arrive(rig.insert([Task(TaskKind.PREEMPTED, 1, tasks[1].request)]))
    return of_state(rig, lambda: rig.propose({4: [2**62, 0], 0: [7], 2: [], 3: [8, 9]}))


def saving(kit: Kit) -> Road:
    """The output of a step that two requests have left, with its clean-up."""
    rig, tasks = filled(kit)
    step = rig.step([4, 0, 2, 5, 1, 3])
    arrive(rig.advance(step))
    gone = [Task(TaskKind.PREEMPTED, 1, tasks[1].request), Task(TaskKind.ABORTED, 4, tasks[4].request)]
    arrive(rig.insert(gone))
    should, sink = rig.rows_of(step), KeepingSink()
    marks = {name: rig.model.cells[name].copy() for name in ("last_preempted", "last_aborted")}

    def settle(ticket: Ticket) -> None:
        assert_no_error(lambda: rig.state.take(cast(OutputTicket, ticket)), "taking the output of a step")
        (record,) = sink.resolve_all()
        arrive(ticket)
        assert_rows(record, should)
        for name, marked in marks.items():
            copied = rig.state.mirror[name]
            assert (copied == marked).all(), (
                f"{name} was copied out as {copied.tolist()}, but was {marked.tolist()} until the clean-up after it"
            )

    return of_state(rig, lambda: rig.save(step, sink), settle)


# -- broadcast_tokens -------------------------------------------------------------------------------------------------

PAIR = Group((0, 1), 1)


class FarSource:
    """The communicator of rank 1 whose rank 0 is nowhere: what that would send is written in stream order."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.streams: list[Stream] = []

    def broadcast(self, memory: Memory, part: ByteRange, stream: Stream) -> Ticket:
        """Receive the header that is due, and other fields than there are."""
        self.streams.append(stream)
        header = self._rig.state.agreements[PAIR.ranks].expected
        sent = header + noise(part.nbytes - HEADER_BYTES, 5).tobytes()
        self._rig.model.block[part.offset : part.end] = np.frombuffer(sent, np.uint8)
        return backdoor.put(self._rig.device, memory, [(part.offset, sent)], stream)

    def exchange(self, block: bytes) -> Mapping[int, bytes]:
        """Rank 0 says the same."""
        return dict.fromkeys(PAIR.ranks, block)

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def far_from_its_source(rig: Rig) -> Iterator[None]:
    """Within it, groups of the device are of two ranks, of which the other one is pretended."""
    far, device = FarSource(rig), rig.device
    device.communicator = lambda group: far  # type: ignore[method-assign]
    try:
        yield
    finally:
        del device.communicator


def can_pretend(kit: Kit) -> bool:
    """True where the device's hook is the base's, which asks ``communicator`` for the group."""
    kinds = [kind for kind in type(kit.device).__mro__ if not issubclass(kind, Lie)]
    return next((kind for kind in kinds if "broadcast_tokens" in vars(kind)), None) is DeviceBase


def broadcasting(kit: Kit) -> Road:
    """The slice of the group's first rank arrives."""
    rig, _ = filled(kit)
    with far_from_its_source(rig):
        rig.bound.open_group(state=rig.state, group=PAIR)

    def broadcast() -> Ticket:
        with far_from_its_source(rig):
            return rig.bound.broadcast_tokens(state=rig.state, group=PAIR, stream=rig.stream)

    return of_state(rig, broadcast)


# -- a plan by itself -------------------------------------------------------------------------------------------------


def submitting(kit: Kit) -> Road:
    """Copies and fills, scattered."""
    before = noise(1 << 15, 3)
    memory, after = kit.device.allocate(before.nbytes), before.copy()
    builder, rows, data = PlanBuilder(memory), np.arange(40) * 512 + 8, noise(40 * 24, 4)
    builder.copy(rows, 24, data)
    builder.fill(rows + 64, 48, np.int64(-7))
    for at, row in zip(rows.tolist(), data.reshape(40, 24), strict=True):
        after[at : at + 24] = row
        after[at + 64 : at + 112].view(np.int64)[...] = -7
    return Road(
        memory, before, lambda stream: kit.device.submit(builder.build(), stream), lambda got: unlike(got, after)
    )


ROADS: dict[str, dict[str, Make]] = {
    "async_set_value": {**{told: form.road for told, form in VALUES.items()}, "a large array": LARGE.road},
    "insert_tasks": {
        "one request": inserting([2]),
        "a request for every slot": inserting(range(6)),
        "requests that leave, go on and enter": changing,
    },
    "advance": {"a plain step": advancing(speculative=False), "a speculative step": advancing(speculative=True)},
    "set_drafts": {"for some slots": drafting},
    "save_output": {"a step that two requests have left": saving},
    "broadcast_tokens": {"from another rank": broadcasting},
    "submit": {"copies and fills": submitting},
}
"""Hook or primitive to its forms."""

ASYNC = {"save_output": "async_d2h"}
"""What a hook's ticket is asynchronous by; the others by async_h2d."""


def roads(kit: Kit, hook: str) -> Iterator[tuple[str, Make]]:
    """The forms of a hook that this device can be asked for, each told in words."""
    if hook != "broadcast_tokens" or can_pretend(kit):
        for told, make in ROADS[hook].items():
            yield f"{hook} ({told})", make


def overlaps(kit: Kit, hook: str) -> bool:
    """True where a call of the hook returns while its stream is held."""
    if hook == "advance" and kit.missing(("overlapped_advance",)):
        return False
    return bool(getattr(kit.capabilities, ASYNC.get(hook, "async_h2d")))
