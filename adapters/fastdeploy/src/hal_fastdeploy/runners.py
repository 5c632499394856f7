"""FastDeploy's model runners as insertions see them: their tensors and their slots.

The GPU's and the XPU's runner differ in what a prefill writes, and in host data (:mod:`hal_fastdeploy.host`).
Everything else is :class:`hal_fastdeploy.insertion.Insertion`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hal_core import Writes

from . import host
from .batches import NO_MORE, TARGET, XPU_OPTIONAL, XPU_TARGET, Places, Table
from .columns import Prefills
from .host import Runner
from .requests import DECODE, PREFILL, Task, thinking_of


class GpuRunner:
    """The GPU's runner: slots by ``get_index_by_batch_id``, lengths in ``seq_lens_this_time_buffer``."""

    module, class_name, device = "fastdeploy.worker.gpu_model_runner", "GPUModelRunner", "cuda"
    tensors: Table = TARGET
    optional: Table = NO_MORE
    hosts = host.GPU
    lengths = "seq_lens_this_time_buffer"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def slots(self) -> dict[int, int]:
        """The map of slots, which looking up a batch id may change."""
        found: dict[int, int] = self.runner.share_inputs.index_to_batch_id
        return found

    def finder(self) -> Callable[[int], int]:
        """Return a function from batch id to slot, for one call. Upstream's own, a search, serves new ids alone."""
        search, slots = self.runner.share_inputs.get_index_by_batch_id, self.slots
        known = {batch_id: slot for slot, batch_id in reversed(slots.items())}

        def find(batch_id: int) -> int:
            slot = known.get(batch_id)
            if slot is None or slots.get(slot) != batch_id:  # a new id may have taken the slot
                slot = known[batch_id] = int(search(batch_id))
            return slot

        return find

    def drafts_of(self, task_length: int) -> int:
        """Return how many draft tokens a prefill of the decode role brings: the first token and one draft."""
        return 2

    def write(self, writes: Writes, target: Places, new: Prefills) -> None:
        """Write prompts as the history, with -1 to the end of the row."""
        target.ragged(writes, "token_ids_all", new.slots, new.tokens.cut(np.zeros_like(new.prompts), new.prompts))
        writes.fill(target["token_ids_all"], new.slots, -1, new.prompts)

    def restarts(self, tasks: Sequence[Task], read: Callable[[str], np.ndarray[Any, Any]]) -> bool:
        """Return False: nothing depends on slots that a DECODE task restarts."""
        return False


class XpuRunner:
    """The XPU's runner: the slot is ``request.idx``, lengths are in ``seq_lens_this_time``, no history is written."""

    module, class_name, device = "fastdeploy.worker.xpu_model_runner", "XPUModelRunner", "xpu"
    tensors: Table = XPU_TARGET
    optional: Table = XPU_OPTIONAL
    hosts = host.XPU
    lengths = "seq_lens_this_time"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.slots: dict[int, int] = {}

    def finder(self) -> Callable[[int], int]:
        """Return a function from batch id to slot, which are the same."""
        return int

    def drafts_of(self, task_length: int) -> int:
        """Return how many draft tokens a prefill of the decode role brings: one more than its tokens."""
        return task_length + 1

    def write(self, writes: Writes, target: Places, new: Prefills) -> None:
        """Write first tokens and lengths again. Versions without ``enable_thinking`` set a limit for each request."""
        target.column(writes, "first_token_ids", new.slots, new.tokens.values[new.tokens.begins + new.starts])
        target.column(writes, "ori_seq_lens_encoder", new.slots, new.lengths)
        if "pre_ids" in target:
            writes.fill(target["pre_ids"], new.slots, -1)
        if "enable_thinking" not in target:
            limits = [thinking_of(task.request) or {} for task in new.tasks]
            target.column(writes, "max_think_lens", new.slots, [limit.get("max_think_lens", -1) for limit in limits])
            writes.fill(target["limit_think_status"], new.slots, 0)

    def restarts(self, tasks: Sequence[Task], read: Callable[[str], np.ndarray[Any, Any]]) -> bool:
        """Return whether a DECODE task restarts a blocked slot. The device is read only if that matters."""
        grown, left = list[int](), set[int]()
        for task in tasks:
            if task.kind == PREFILL:
                return False  # not_need_stop becomes True anyway
            if task.kind == DECODE and task.slot not in left:
                grown.append(task.slot)
            elif task.kind != DECODE:
                left.add(task.slot)
        if not grown or bool(np.asarray(self.runner.share_inputs["not_need_stop"]).reshape(-1)[0]):
            return False
        return bool(read("is_block_step").reshape(-1)[grown].any())
