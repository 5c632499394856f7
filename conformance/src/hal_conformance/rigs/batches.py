"""Task batches that are valid for a model's state, drawn task by task."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from hal_core.slots.fields import SplitRole
from hal_core.slots.tasks import Task, TaskKind
from hypothesis import strategies as st

from ..draw.fields import draw_extra
from ..draw.requests import blocks as blocks_ids
from ..draw.requests import requests, row, tokens, whole
from ..kit import Draw
from .rig import Rig

ENTER = (TaskKind.PREFILL, TaskKind.REMOTE_PREFILL)
LEAVE = (TaskKind.PREEMPTED, TaskKind.ABORTED)
ALL = tuple(TaskKind)


def draw_batch(
    draw: Draw,
    rig: Rig,
    kinds: Sequence[TaskKind] = ALL,
    *,
    least: int = 0,
    role: SplitRole | None = None,
) -> list[Task]:
    """Return a batch over some slots, each with a currently possible task; empty if there is none."""
    slots = draw(st.permutations(range(rig.sizes.num_slots)), "slots")
    wanted = draw(whole(min(least, len(slots)), len(slots)), "number of slots")
    tasks: list[Task] = []
    for slot in slots:
        if len(tasks) >= wanted:
            break
        tasks += draw_tasks(draw, rig, slot, kinds, role)
    return tasks


def possible(rig: Rig, slot: int, kinds: Sequence[TaskKind]) -> list[TaskKind]:
    """Return the kinds of tasks currently possible for a slot."""
    resident = rig.model.residents.get(slot)
    if resident is None:
        return [kind for kind in kinds if kind in ENTER]
    found: list[TaskKind] = []
    unreported = [leaver.kind for leaver in rig.model.leavers.get(slot, ())]
    for kind in kinds:
        waits = rig.model.get("seq_lens_this_time", slot) == 0 and not rig.model.get("stop_flags", slot)
        if kind is TaskKind.PREFILL_CHUNK and waits and resident.prefilled < resident.total:
            found.append(kind)
        if kind is TaskKind.MORE_BLOCKS and rig.sizes.max_blocks > resident.blocks:
            found.append(kind)
        if kind in LEAVE and kind not in unreported:
            found.append(kind)
    return found


def draw_tasks(draw: Draw, rig: Rig, slot: int, kinds: Sequence[TaskKind], role: SplitRole | None) -> list[Task]:
    """Return one task for a slot, or two if a request leaves and the next enters in one batch."""
    choices = possible(rig, slot, kinds)
    if not choices:
        return []
    kind = draw(st.sampled_from(choices), f"what happens to slot {slot}")
    if kind in ENTER:
        return [draw_entering(draw, rig, slot, kind, role)]
    resident = rig.model.residents[slot]
    if kind in LEAVE:
        found = [Task(kind, slot, resident.admitted)]
        entering = [other for other in kinds if other in ENTER]
        again: bool = bool(entering) and draw(st.booleans(), f"slot {slot} is entered at once")
        if again:
            found.append(draw_entering(draw, rig, slot, draw(st.sampled_from(entering), "how"), role))
        return found
    if kind is TaskKind.MORE_BLOCKS:
        room = rig.sizes.max_blocks - resident.blocks
        blocks = draw(blocks_ids(0, room), f"more blocks of slot {slot}")
        return [Task(kind, slot, resident.admitted, blocks=blocks, first_block=resident.blocks)]
    length = draw(whole(1, resident.total - resident.prefilled), f"chunk of slot {slot}")
    blocks = draw_blocks(draw, rig, slot, resident.prefilled + length, resident.blocks)
    return [Task(kind, slot, resident.admitted, resident.prefilled, length, blocks, resident.blocks)]


def draw_blocks(draw: Draw, rig: Rig, slot: int, covered: int, have: int) -> list[int]:
    """Return block ids that, with the ``have`` in use, cover so many tokens, or a few more."""
    needed = max(0, -(-covered // rig.sizes.block_size) - have)
    room = rig.sizes.max_blocks - have
    return draw(blocks_ids(needed, room), f"blocks of slot {slot}")


def draw_entering(draw: Draw, rig: Rig, slot: int, kind: TaskKind, role: SplitRole | None) -> Task:
    """Return a task that puts a new request into a slot."""
    if kind is TaskKind.REMOTE_PREFILL and role is None:
        role = SplitRole.DECODE
    if role is SplitRole.PREFILL:
        kind = TaskKind.PREFILL  # such a request is handed over from here, not to here
    left = 2 if kind is TaskKind.REMOTE_PREFILL else 1  # the first token is there, and another must follow
    asked = draw(requests(rig.sizes, rig.new_name(), role, left=left), f"request for slot {slot}")
    if rig.extra:
        asked = replace(asked, extra=draw_extra(draw, rig.extra, rig.sizes))
    request = rig.admit(asked)
    if kind is TaskKind.REMOTE_PREFILL:
        blocks = draw_blocks(draw, rig, slot, request.total, 0)
        drafts = draw(row(0, rig.sizes.max_draft_tokens), "drafts")
        first = draw(tokens, "first token")
        return Task(kind, slot, request, request.total, 0, blocks, first_token=first, drafts=drafts)
    start = draw(_nothing_or(request.total - 1), "tokens cached already")
    length = request.total - start - draw(_nothing_or(request.total - start - 1), "tokens to prefill later")
    return Task(kind, slot, request, start, length, draw_blocks(draw, rig, slot, start + length, 0))


@functools.cache
def _nothing_or(most: int) -> st.SearchStrategy[int]:
    return st.just(0) | st.integers(0, most)


def told(tasks: list[Task]) -> str:
    """Return a short text of a batch, for messages; the draws printed beside it have the details."""
    return ", ".join(f"{task.kind.name.lower()} {task.request.request_id!r} in slot {task.slot}" for task in tasks)
