"""All ways to put work on a stream: each hook in several forms, ``update_inputs`` and a bare plan.

A :class:`hal_conformance.rigs.forms.Road` is prepared before anything is held. Then its ``act`` makes its one call on a
stream, and its ``wrong`` compares bytes read later with the expected ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from hal_core.memory.plan import PlanBuilder
from hal_core.output.ticket import OutputTicket
from hal_core.slots.admission import Request, SamplingParams
from hal_core.slots.fields import SplitRole, StateConfig
from hal_core.slots.tasks import Task, TaskKind

from ..harness.asserts import assert_no_error
from ..harness.backdoor import arrive
from ..harness.bits import noise
from ..harness.sinks import KeepingSink
from ..kit import Kit
from ..oracle.slots import difference
from .forms import LARGE, VALUES, Make, Road, unlike
from .pretended import PAIR, can_pretend, far_from_its_source
from .rig import Rig, assert_rows

if TYPE_CHECKING:
    from hal_core.streams import Stream
    from hal_core.tickets import Ticket


# -- hooks on a state -------------------------------------------------------------------------------------------------

SIZES = StateConfig(
    num_slots=6,
    max_model_len=24,
    block_size=2,
    max_draft_tokens=2,
    max_logprobs=1,
    max_stop_sequences=2,
    max_bad_words=2,
)
RICH = SamplingParams(0.5, 3, 0.9, 0.1, 7, 1.1, 0.2, 0.3, 1, 9, ((1, 2), (3,)), (4, 5), (6,), 1)


def new_tasks(rig: Rig, slots: Sequence[int]) -> list[Task]:
    """Return a new request for each slot, each with a different prompt."""
    found = []
    for slot in slots:
        prompt = [100 * slot + 1, 100 * slot + 2, 100 * slot + 3]
        request = rig.admit(Request(rig.new_name(), prompt, RICH if slot % 2 else SamplingParams(max_tokens=9)))
        found.append(Task(TaskKind.PREFILL, slot, request, 0, 3, [2 * slot, 2 * slot + 1]))
    return found


def of_state(rig: Rig, call: Callable[[], Ticket], complete: Callable[[Ticket], None] | None = None) -> Road:
    """Return the road of a call that a rig makes on its stream."""

    def act(stream: Stream) -> Ticket:
        rig.stream = stream
        return call()

    road = Road(rig.state.memory, rig.model.block.copy(), act, lambda got: difference(rig.model, got))
    road.complete = complete or road.complete
    return road


def inserting(slots: Sequence[int]) -> Make:
    """Insert new requests into an empty state."""

    def make(kit: Kit) -> Road:
        rig = Rig(kit, SIZES)
        tasks = new_tasks(rig, slots)
        return of_state(rig, lambda: rig.insert(tasks))

    return make


def filled(kit: Kit, slots: Sequence[int] = range(6)) -> tuple[Rig, list[Task]]:
    """Return a state with a request in each of the slots, whose first tokens are sampled."""
    rig = Rig(kit, SIZES)
    tasks = new_tasks(rig, slots)
    arrive(rig.insert(tasks))
    n, most = SIZES.num_slots, SIZES.max_accept
    accepted = 10 + np.arange(n * most, dtype=np.int64)
    counts = np.array([1 + slot % most for slot in range(n)], np.int32)
    arrive(rig.poke({"sampled_token_ids": 50 + np.arange(n), "accept_tokens": accepted, "accept_num": counts}))
    return rig, tasks


def changing(kit: Kit) -> Road:
    """Let requests leave, one enter at once, one be handed over, and one get more blocks."""
    rig, tasks = filled(kit, range(5))
    (again,) = new_tasks(rig, [1])
    handed = rig.admit(Request(rig.new_name(), [7, 8], SamplingParams(max_tokens=9), role=SplitRole.DECODE))
    batch = [
        Task(TaskKind.PREEMPTED, 0, tasks[0].request),
        Task(TaskKind.ABORTED, 1, tasks[1].request),
        again,
        Task(TaskKind.MORE_BLOCKS, 2, tasks[2].request, blocks=[77], first_block=2),
        Task(TaskKind.REMOTE_PREFILL, 5, handed, 2, blocks=[3, 4], first_token=9, drafts=[1, 2]),
    ]
    return of_state(rig, lambda: rig.insert(batch))


def advancing(*, speculative: bool) -> Make:
    """Run a step over every slot."""

    def make(kit: Kit) -> Road:
        rig, _ = filled(kit)
        step = rig.step([4, 0, 2, 5, 1, 3], speculative=speculative)
        return of_state(rig, lambda: rig.update_inputs(step))

    return make


def drafting(kit: Kit) -> Road:
    """Set drafts after a step: as many as fit, one, none; none for a slot whose request has left."""
    rig, tasks = filled(kit)
    arrive(rig.update_inputs(rig.step([4, 0, 2, 5, 1, 3], speculative=True)))
    arrive(rig.insert([Task(TaskKind.PREEMPTED, 1, tasks[1].request)]))
    return of_state(rig, lambda: rig.propose({4: [2**62, 0], 0: [7], 2: [], 3: [8, 9]}))


def saving(kit: Kit) -> Road:
    """Save the output of a step that two requests have left, with its clean-up."""
    rig, tasks = filled(kit)
    step = rig.step([4, 0, 2, 5, 1, 3])
    arrive(rig.update_inputs(step))
    gone = [Task(TaskKind.PREEMPTED, 1, tasks[1].request), Task(TaskKind.ABORTED, 4, tasks[4].request)]
    arrive(rig.insert(gone))
    should, sink = rig.rows_of(step), KeepingSink()
    marks = {name: rig.model.cells[name].copy() for name in ("last_preempted", "last_aborted")}

    def complete(ticket: Ticket) -> None:
        assert_no_error(lambda: rig.state.take(cast(OutputTicket, ticket)), "taking the output of a step")
        (record,) = sink.resolve_all()
        arrive(ticket)
        assert_rows(record, should)
        for name, marked in marks.items():
            copied = rig.state.mirror[name]
            assert (copied == marked).all(), (
                f"{name} was copied out as {copied.tolist()}, but was {marked.tolist()} until the clean-up after it"
            )

    return of_state(rig, lambda: rig.save(step, sink), complete)


# -- broadcast_tokens -------------------------------------------------------------------------------------------------


def broadcasting(kit: Kit) -> Road:
    """Receive the slice of the group's first rank."""
    rig, _ = filled(kit)
    with far_from_its_source(rig):
        rig.bound.open_group(state=rig.state, group=PAIR)

    def broadcast() -> Ticket:
        with far_from_its_source(rig):
            return rig.bound.broadcast_tokens(state=rig.state, group=PAIR, stream=rig.stream)

    return of_state(rig, broadcast)


# -- a bare plan ------------------------------------------------------------------------------------------------------


def submitting(kit: Kit) -> Road:
    """Submit scattered copies and fills."""
    before = noise(3, 1 << 15)
    memory, after = kit.device.allocate(before.nbytes), before.copy()
    builder, rows, data = PlanBuilder(memory), np.arange(40) * 512 + 8, noise(4, 40 * 24)
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
    "update_inputs": {"a plain step": advancing(speculative=False), "a speculative step": advancing(speculative=True)},
    "set_drafts": {"for some slots": drafting},
    "save_output": {"a step that two requests have left": saving},
    "broadcast_tokens": {"from another rank": broadcasting},
    "submit": {"copies and fills": submitting},
}
"""Hook or primitive to its forms."""

ASYNC = {"save_output": "async_d2h"}
"""Hook to the capability that makes its ticket asynchronous; async_h2d for all other hooks."""


def roads(kit: Kit, hook: str) -> Iterator[tuple[str, Make]]:
    """Yield the forms of a hook that this device supports, each with a description."""
    if hook != "broadcast_tokens" or can_pretend(kit):
        for told, make in ROADS[hook].items():
            yield f"{hook} ({told})", make


def overlaps(kit: Kit, hook: str) -> bool:
    """Return True if a call of the hook returns while its stream is held."""
    if hook == "update_inputs" and kit.missing(("overlapped_update",)):
        return False
    return bool(getattr(kit.capabilities, ASYNC.get(hook, "async_h2d")))
