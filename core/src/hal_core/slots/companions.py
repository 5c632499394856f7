"""Companion states: the same requests, written by one insertion.

A proposer keeps such a state next to the target's (block tables, parameters of sampling), with its own slot order or a
declared copy of the target's, and with its own fields. The two share one block of device memory, so that the writes of
an insertion to both are one plan and one submission. A step's own changes are made only in the target's state: in a
companion, lengths are as of the insertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from ..errors import InvalidValue
from .declared import Companion, StateField, table_with
from .fields import StateConfig
from .state import SlotState, check_sizes, checked_layout
from .tasks import ENTERING, LEAVING, TaskBatch

if TYPE_CHECKING:
    from .admission import AdmittedRequest
    from .state import StateDevice


def open_states(
    device: StateDevice,
    sizes: StateConfig,
    name: str,
    companions: Sequence[str | Companion],
    fields: Sequence[StateField] = (),
) -> SlotState:
    """Return a state, with companions after it in its memory (``SlotState.companions``).

    Raises :class:`InvalidValue` for sizes that fit no machine, a name given twice, and an invalid field.
    """
    own = [one if isinstance(one, Companion) else Companion(one) for one in companions]
    check_sizes(sizes)
    table = table_with(sizes, fields)
    if not own:
        return SlotState(device, sizes, name=name, table=table)
    if len({name, *[one.name for one in own]}) != 1 + len(own):
        names = [name, *[one.name for one in own]]
        raise InvalidValue(f"{names} contain a name twice", cure="give each its own name", argument="companions")
    tables = [table, *[table_with(sizes, one.fields, stepped=False) for one in own]]
    ends = [*accumulate([checked_layout(sizes, one).nbytes for one in tables])]
    memory = device.allocate(ends[-1])
    target = SlotState(device, sizes, name=name, table=table, room=(memory, 0))
    target.companions = tuple(
        [
            SlotState(device, sizes, name=one.name, table=lines, room=(memory, begin), same_slots=one.same_slots)
            for one, lines, begin in zip(own, tables[1:], ends, strict=False)
        ]
    )
    return target


def tasks_of_companion(companion: SlotState, tasks: TaskBatch) -> TaskBatch:
    """Return the same tasks for the requests' slots in a companion: the target's slots if declared so, else an entering
    request gets the highest free one."""
    slots = tasks.plain["slots"] if companion.same_slots else _own_slots(companion, tasks)
    return tasks.moved(slots, _own_requests(companion, tasks.requests))


def _own_slots(companion: SlotState, tasks: TaskBatch) -> list[int]:
    table = companion.host_table
    free = [slot for slot, request in enumerate(table.requests) if request is None]
    slots = []
    for kind, request in zip(tasks.plain["kinds"], tasks.requests, strict=True):
        slot = free.pop() if kind in ENTERING else table.live[request.admission_id]
        if kind in LEAVING:
            free.append(slot)
        slots.append(slot)
    return slots


def _own_requests(companion: SlotState, requests: Sequence[AdmittedRequest]) -> list[AdmittedRequest]:
    """Return the requests as they were packed for a companion with its own fields."""
    key, found = companion.layout.config_key, []
    for request in requests:
        own = next((one for one in (request, *request.companions) if one.config_key == key), None)
        if own is None:
            raise InvalidValue(
                f"the request {request.request_id!r} was not admitted for the companion {companion.name!r}",
                cure="admit it with state.admit",
                argument="tasks",
            )
        found.append(own)
    return found
