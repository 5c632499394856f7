"""Invalid tasks: each function turns a valid task into one that G8 must refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hal_core.slots.admission import Request
from hal_core.slots.tasks import Task, TaskKind

from .batches import ENTER, LEAVE
from .rig import Rig

Trouble = Callable[[Rig, Task], Task | None]
"""Returns the invalid task, or None if the change does not apply to it."""


def slot_below_range(rig: Rig, task: Task) -> Task | None:
    """Make the slot negative: indexing from the end would hit another request."""
    return replace(task, slot=task.slot - rig.sizes.num_slots)


def slot_above_range(rig: Rig, task: Task) -> Task | None:
    """Name a slot that does not exist."""
    return replace(task, slot=rig.sizes.num_slots)


def no_tokens(rig: Rig, task: Task) -> Task | None:
    """Schedule no tokens."""
    return replace(task, num_scheduled_tokens=0) if task.kind in (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK) else None


def too_many_tokens(rig: Rig, task: Task) -> Task | None:
    """Schedule more tokens than the request has, with blocks for all of them."""
    if task.kind not in (TaskKind.PREFILL, TaskKind.PREFILL_CHUNK):
        return None
    return replace(task, num_scheduled_tokens=task.request.total - task.num_computed_tokens + 1)


def negative_start(rig: Rig, task: Task) -> Task | None:
    """Begin before the first token."""
    return replace(task, num_computed_tokens=-1) if task.kind is TaskKind.PREFILL else None


def gap_before_chunk(rig: Rig, task: Task) -> Task | None:
    """Begin the chunk after the end of the last one."""
    if task.kind is not TaskKind.PREFILL_CHUNK or task.num_scheduled_tokens < 2:
        return None
    return replace(
        task, num_computed_tokens=task.num_computed_tokens + 1, num_scheduled_tokens=task.num_scheduled_tokens - 1
    )


def blocks_elsewhere(rig: Rig, task: Task) -> Task | None:
    """Leave a hole in the block table, or overwrite entries in use."""
    return None if task.kind in LEAVE else replace(task, first_block=task.first_block + 1)


def negative_block(rig: Rig, task: Task) -> Task | None:
    """Use an invalid block id."""
    return None if task.kind in LEAVE or not task.blocks else replace(task, blocks=[-1, *task.blocks[1:]])


def too_many_blocks(rig: Rig, task: Task) -> Task | None:
    """Give more blocks than the table holds: the next slot's row would be overwritten."""
    return None if task.kind in LEAVE else replace(task, blocks=[0] * (rig.sizes.max_blocks - task.first_block + 1))


def too_few_blocks(rig: Rig, task: Task) -> Task | None:
    """Give no room for the KV of the tokens."""
    return (
        replace(task, blocks=())
        if task.kind in ENTER and task.blocks and task.num_scheduled_tokens + task.num_computed_tokens
        else None
    )


def no_first_token(rig: Rig, task: Task) -> Task | None:
    """Hand over without the first token."""
    return replace(task, first_token=-1) if task.kind is TaskKind.REMOTE_PREFILL else None


def keys_not_present(rig: Rig, task: Task) -> Task | None:
    """Hand over without declaring the blocks present, with drafts or without."""
    return replace(task, num_computed_tokens=0) if task.kind is TaskKind.REMOTE_PREFILL else None


def some_keys_present(rig: Rig, task: Task) -> Task | None:
    """Declare the blocks of all tokens but the last present."""
    return replace(task, num_computed_tokens=task.request.total - 1) if task.kind is TaskKind.REMOTE_PREFILL else None


def too_many_keys_present(rig: Rig, task: Task) -> Task | None:
    """Declare the first token's keys and values present too, which the decode node must compute."""
    return replace(task, num_computed_tokens=task.request.total + 1) if task.kind is TaskKind.REMOTE_PREFILL else None


def too_many_drafts(rig: Rig, task: Task) -> Task | None:
    """Give more drafts than the field holds, or drafts where none are allowed."""
    most = rig.sizes.max_draft_tokens if task.kind is TaskKind.REMOTE_PREFILL else 0
    return None if task.kind in LEAVE else replace(task, drafts=[1] * (most + 1))


def negative_draft(rig: Rig, task: Task) -> Task | None:
    """Give an invalid token as a draft."""
    return replace(task, drafts=[-1]) if task.kind is TaskKind.REMOTE_PREFILL and rig.sizes.max_draft_tokens else None


def another_request(rig: Rig, task: Task) -> Task | None:
    """Name a request that is not in the slot."""
    if task.kind in ENTER:
        return None
    return replace(task, request=rig.admit(Request(f"stranger to slot {task.slot}", [1])))


def already_running(rig: Rig, task: Task) -> Task | None:
    """Insert a request that is already in another slot."""
    running = [resident.admitted for slot, resident in rig.model.residents.items() if slot != task.slot]
    if task.kind is not TaskKind.PREFILL or not running:
        return None
    return replace(task, request=running[0], num_computed_tokens=0, num_scheduled_tokens=1, blocks=[0])


TROUBLES: tuple[Trouble, ...] = (
    slot_below_range,
    slot_above_range,
    no_tokens,
    too_many_tokens,
    negative_start,
    gap_before_chunk,
    blocks_elsewhere,
    negative_block,
    too_many_blocks,
    too_few_blocks,
    no_first_token,
    keys_not_present,
    some_keys_present,
    too_many_keys_present,
    too_many_drafts,
    negative_draft,
    another_request,
    already_running,
)
