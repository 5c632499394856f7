"""Liars about companions, the states that one insertion must serve with the target, and about several memories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hal_core.errors import InvalidBatch, InvalidValue
from hal_core.memory.plan import WritePlan
from hal_core.slots.companions import _own_slots, tasks_of_companion
from hal_core.slots.insertion import plan_insert
from hal_core.slots.tasks import LEAVING, TaskBatch, TaskKind
from hal_core.tickets import DONE

from .proxies import HELD
from .rows import SAVE, Call, How, meanwhile, noted, register, row


def reaching(companions: Callable[[Call], tuple[Any, Any]]) -> How:
    """Return a lie: ``companions(call)`` returns a state and those of its companions that it has during the call."""
    return meanwhile(lambda call: ((reached := companions(call))[0], "companions", reached[1]))


forgetting = reaching(lambda call: (call.state, ()))


def apart(call: Call) -> object:
    ticket = forgetting(call)
    for companion in call.state.companions:
        ticket = call.me.submit(plan_insert(companion, tasks_of_companion(companion, call.tasks)), call.stream)
    return ticket


def first_alone_counts(call: Call) -> object:
    state, tasks = call.state, call.tasks
    if len(state.companions) < 2:
        return call()
    plan, skipped = plan_insert(state, tasks), []
    for companion in state.companions[1:]:
        own, place = tasks_of_companion(companion, tasks).plain, companion.layout.fields["blocks_num"]
        for slot, kind in zip(own["slots"], own["kinds"], strict=True):
            if kind == TaskKind.MORE_BLOCKS:
                skipped.append(place.offset + slot * place.stride)
    writes = plan.writes[~np.isin(plan.writes["dst"], np.array(skipped, np.uint64))]
    return call.me.submit(WritePlan(plan.memory, writes, plan.pieces, plan.records), call.stream)


def own_slots(call: Call) -> object:
    honest, companion = call(), call.companion
    if not companion.same_slots or honest.plain["slots"] == (own := _own_slots(companion, call.tasks)):
        return honest
    return honest.moved(own, honest.requests)


def with_the_targets_lengths(call: Call) -> object:
    tables = [companion.host_table for companion in call.state.companions]
    own = [table.row_lengths for table in tables]
    for table in tables:
        table.row_lengths = call.state.host_table.row_lengths.copy()
    try:
        return call()
    finally:
        for table, lengths in zip(tables, own, strict=True):
            table.row_lengths = lengths


def unguarded(*kinds: TaskKind) -> How:
    """Return a lie: batches of these kinds wait for the last readers of the target's slots, not of companions'."""

    def lie(call: Call) -> object:
        if call.self.name == "target" or not set(kinds).issuperset(call.tasks.plain["kinds"]):
            return call()
        return None

    return lie


def booking(batch: Callable[[Any], TaskBatch | None]) -> Callable[[Call, Any], None]:
    """Return what books ``batch(tasks)`` in the companions at an error of the insertion."""

    def book(call: Call, _: object) -> None:
        booked = batch(call.tasks)
        for companion in call.state.companions:
            if booked is not None:
                companion.host_table.commit(tasks_of_companion(companion, booked))

    return book


def batch_of(tasks: Any) -> TaskBatch:  # noqa: ANN401 (a batch or tasks)
    return tasks if isinstance(tasks, TaskBatch) else TaskBatch.of(tasks)


def first_of(tasks: Any) -> TaskBatch | None:  # noqa: ANN401
    listed = list(tasks) if not isinstance(tasks, TaskBatch) else []
    return TaskBatch.of(listed[:1]) if listed else None


def book_in_turn(call: Call, error: InvalidValue) -> None:
    if not isinstance(error, InvalidBatch):
        booking(batch_of)(call, error)


GUARDED = (*HELD, "overlapped_update")
TABLE = {
    "the companions of a state are left as they were": row(
        "ForgetsCompanions", 9, "insert_tasks", forgetting
    ),  # a device that plans only for the given state
    "companions are written in the target's slot order": row(
        "OneSlotOrder",
        9,
        "plan of a companion's tasks",
        lambda call: call.tasks,
        seen="FastDeploy (one runner of mtp.py takes no map)",
    ),  # a proposer's insertion without the map of slots
    "a companion declared with the target's slots has slots of its own": row(
        "OwnSlotsAllTheSame", 9, "plan of a companion's tasks", own_slots
    ),  # the declaration is not looked at
    "each companion is a submission of its own": row(
        "CompanionsApart", 10, "insert_tasks", apart, "fused_scatter", "FastDeploy (insert_tasks_v1)"
    ),  # a second insertion for the proposer's state, after the target's
    "a request that gets more blocks has its count of blocks raised in the target and the first companion alone": row(
        "LaterCompanionsBehind", 9, "insert_tasks", first_alone_counts
    ),  # written when there was one
    "rows of a companion are reset to the lengths of the target's slots": row(
        "TargetsLengths", 11, "insert_tasks", with_the_targets_lengths
    ),  # there was one table of lengths before there were companions
    "an insertion waits for the readers of its target alone": row(
        "CompanionsUnguarded", 28, "guard of a batch", lambda call: call() if call.self.companions else None, GUARDED
    ),  # a proposer's step still reads the slot that the request gets there
    "requests leave companions beside a step that reads their slots": row(
        "LeavesBesideACompanionsStep", 28, "guard of a batch", unguarded(*LEAVING), GUARDED
    ),  # a slot without a request counts as unread
    "requests get blocks in companions beside a step that reads them": row(
        "GrowsBesideACompanionsStep", 28, "guard of a batch", unguarded(TaskKind.MORE_BLOCKS), GUARDED
    ),  # blocks that are appended count as unread, as no step has used them yet
    "companions book an insertion that the driver refuses": row(
        "CompanionsBookFailures", 26, "policy.insert_tasks", noted(RuntimeError, booking(batch_of))
    ),  # their host tables are changed before the write
    "a batch that is refused is booked in the companions, as far as it is sound": row(
        "CompanionsBookRefusals", 8, "policy.insert_tasks", noted((InvalidBatch, InvalidValue), booking(first_of))
    ),  # slots are given while the batch is looked at
    "companions are booked one after the other, also where a later one refuses the batch": row(
        "CompanionsBookInTurn", 8, "policy.insert_tasks", noted(InvalidValue, book_in_turn)
    ),  # the last one's check comes after the first one's booking
    "a rank that sends nothing does not clean its companions": row(
        "CompanionsOfTheFirstRank",
        18,
        "policy.save_output",
        reaching(lambda call: (call.state, call.state.companions if call.step.group.is_first else ())),
    ),  # the clean-up is a part of sending
    "only the first companion is cleaned": row(
        "FirstCompanionCleaned", 18, SAVE, reaching(lambda call: (call.state, call.state.companions[:1]))
    ),  # written when there was one
    "a release of slots reaches no companion": row(
        "ReleasesReachNoCompanion", 9, "release of slots", reaching(lambda call: (call.self, ()))
    ),  # the engine frees the target's slots alone
    "a release of slots reaches the first companion alone": row(
        "ReleasesReachOneCompanion", 9, "release of slots", reaching(lambda call: (call.self, call.self.companions[:1]))
    ),  # a worker has one proposer, it is believed
}
register(__name__, TABLE)

# -- plans over several memories ---------------------------------------------------------------------------------------


def one_by_one(call: Call) -> object:
    ticket: object = DONE
    for plan in call.plans:
        ticket = call(plans=[plan])
    return ticket


def shared_payloads(call: Call) -> object:
    plan, begin = call(), 0
    for one in call.plans[:-1]:
        begin += len(one.flat().writes)
    copies = plan.writes[begin:]
    copies["source"][copies["pattern_bytes"] == 0] = 0
    return plan


MEMORIES = {
    "the last of several memories is forgotten": row(
        "ForgetsTheLastMemory",
        5,
        "submit_all",
        lambda call: call(plans=call.plans[:-1] or call.plans),
        "several_memories",
    ),  # a loop that ends one too early
    "a write reaches the first 64 memories": row(
        "SixtyFourMemories", 5, "submit_all", lambda call: call(plans=call.plans[:64]), "several_memories"
    ),  # a kernel's argument has room for so many addresses
    "each memory is a submission of its own": row(
        "MemoriesApart", 10, "submit_all", one_by_one, "several_memories", "FastDeploy (async_set_value)"
    ),  # a tensor after the other
    "bytes for the second memory are taken from the first's": row(
        "SharesPayloads", 5, "plan of several memories", shared_payloads, ("several_memories", "async_h2d")
    ),  # joined plans whose payloads are not
}
register(__name__, MEMORIES)
