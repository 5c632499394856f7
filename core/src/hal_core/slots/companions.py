"""States beside a state: the same requests, each in a slot of the companion's own, written by one insertion.

A proposer keeps such a state next to the target's (block tables, parameters of sampling), with its own slot order. The
two lie in one block of device memory, so that whatever an insertion writes to both is one plan and one submission. What
a step changes by itself it changes in the target's alone: of a companion, lengths are as of the insertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InvalidValue
from .fields import StateConfig
from .state import SlotState, placed
from .tasks import ENTERING, LEAVING, TaskBatch

if TYPE_CHECKING:
    from .state import StateDevice


def open_states(device: StateDevice, sizes: StateConfig, name: str, beside: Sequence[str]) -> SlotState:
    """A state, and companions of these names behind it in its memory (``SlotState.companions``).

    Raises :class:`InvalidValue` for sizes that no machine has room for, and for a name given twice.
    """
    if not beside:
        return SlotState(device, sizes, name=name)
    if len({name, *beside}) != 1 + len(beside):
        raise InvalidValue(f"{[name, *beside]} name a state twice", cure="give each its own name", argument="beside")
    nbytes = placed(sizes).nbytes
    memory = device.allocate(nbytes * (1 + len(beside)))
    target = SlotState(device, sizes, name=name, room=(memory, 0))
    others = [
        SlotState(device, sizes, name=other, room=(memory, nbytes * number)) for number, other in enumerate(beside, 1)
    ]
    target.companions = tuple(others)
    return target


def tasks_beside(companion: SlotState, tasks: TaskBatch) -> TaskBatch:
    """The same tasks for the slots that the requests have in a companion; who enters gets its highest free one."""
    table = companion.host_table
    free = [slot for slot, request in enumerate(table.requests) if request is None]
    slots = []
    for kind, request in zip(tasks.plain["kinds"], tasks.requests, strict=True):
        slot = free.pop() if kind in ENTERING else table.live[request.admission_id]
        if kind in LEAVING:
            free.append(slot)
        slots.append(slot)
    plain = tasks.plain
    return TaskBatch(
        plain["kinds"],
        slots,
        tasks.requests,
        plain["num_computed_tokens"],
        plain["num_scheduled_tokens"],
        tasks.block_ids,
        plain["first_blocks"],
        plain["first_tokens"],
        tasks.drafts,
    )
