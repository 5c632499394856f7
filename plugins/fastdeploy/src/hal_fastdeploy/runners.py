"""FastDeploy's model runners as insertions see them: their tensors, their slots and their host data.

The GPU's and the XPU's runner differ in what a prefill writes, and in their host lists. Everything else is
:class:`hal_fastdeploy.insertion.Insertion`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hal_core import Writes

from .batches import TARGET, XPU_TARGET, Places
from .requests import DECODE, PREFILL, Task

Runner = Any
"""FastDeploy's model runner."""
Read = Callable[[str], np.ndarray[Any, Any]]


class GpuRunner:
    """The GPU's runner: slots by ``get_index_by_batch_id``, lengths in ``seq_lens_this_time_buffer``."""

    module, class_name, device = "fastdeploy.worker.gpu_model_runner", "GPUModelRunner", "cuda"
    tensors: Mapping[str, tuple[str, str]] = TARGET
    lengths = "seq_lens_this_time_buffer"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def slots(self) -> dict[int, int]:
        """The map of slots, which looking up a batch id may change."""
        found: dict[int, int] = self.runner.share_inputs.index_to_batch_id
        return found

    def slot_of(self, batch_id: int) -> int:
        """Return the slot of a batch id."""
        return int(self.runner.share_inputs.get_index_by_batch_id(batch_id))

    def drafts_of(self, task_length: int) -> int:
        """Return how many draft tokens a prefill of the decode role brings: the first token and one draft."""
        return 2

    def write(self, writes: Writes, target: Places, new: Sequence[Task], slots: Sequence[int]) -> None:
        """Write prompts as the history, with -1 to the end of the row."""
        prompts = [task.tokens[: task.prompt] for task in new]
        writes.ragged(target["token_ids_all"], slots, prompts)
        target.fill_behind(writes, "token_ids_all", slots, [*map(len, prompts)], -1)

    def restarts(self, tasks: Sequence[Task], read: Read) -> bool:
        """Return False: nothing depends on slots that a DECODE task restarts."""
        return False

    def book(self, tasks: Sequence[Task], num_running_requests: int, decodes: bool, restarts: bool) -> None:
        """Write the host lists and attributes, in the requests' order."""
        runner, inputs = self.runner, self.runner.share_inputs
        for task in tasks:
            if task.kind == PREFILL:
                self._book_new(task, decodes)
            elif task.kind != DECODE:
                for name in ("prompt_logprobs_reqs", "in_progress_prompt_logprobs"):
                    getattr(runner, name).pop(task.request.request_id, None)
                runner.forward_batch_reqs_list[task.slot] = None
        inputs["seq_lens_this_time"] = inputs["seq_lens_this_time_buffer"][:num_running_requests]

    def _book_new(self, task: Task, decodes: bool) -> None:
        runner, inputs = self.runner, self.runner.share_inputs
        request, slot = task.request, task.slot
        inputs["req_ids"][slot] = request.request_id
        inputs["is_chunk_step"][slot : slot + 1] = not task.ends_prefill
        inputs["logits_processors_args"][slot] = request.get("logits_processors_args") or {}
        runner.forward_batch_reqs_list[slot] = request
        runner.exist_prefill_flag = not decodes
        if decodes and runner._cached_launch_token_num != -1:
            drafts = int(runner.speculative_config.num_speculative_tokens) if runner.speculative_decoding else 0
            runner._cached_launch_token_num += drafts + 1
            runner._cached_real_bsz += 1
        if method_of(runner) == "suffix":
            runner.proposer.start_request(slot, request.request_id, [*map(int, request.prompt_token_ids)])
        runner.sampler.apply_logits_processor(slot, None, [])

    def book_proposer(self, own: Any) -> None:  # noqa: ANN401 (a ProposerInputBatch)
        """Give the proposer the map of slots."""
        own.index_to_batch_id = dict(self.slots)


class XpuRunner:
    """The XPU's runner: the slot is ``request.idx``, lengths are in ``seq_lens_this_time``, no history is written."""

    module, class_name, device = "fastdeploy.worker.xpu_model_runner", "XPUModelRunner", "xpu"
    tensors: Mapping[str, tuple[str, str]] = XPU_TARGET
    lengths = "seq_lens_this_time"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.slots: dict[int, int] = {}

    def slot_of(self, batch_id: int) -> int:
        """Return the batch id, which is the slot."""
        return int(batch_id)

    def drafts_of(self, task_length: int) -> int:
        """Return how many draft tokens a prefill of the decode role brings: one more than its tokens."""
        return task_length + 1

    def write(self, writes: Writes, target: Places, new: Sequence[Task], slots: Sequence[int]) -> None:
        """Write first tokens and lengths again, and take thinking limits off."""
        target.column(writes, "first_token_ids", slots, [int(task.piece[0]) for task in new])
        target.column(writes, "ori_seq_lens_encoder", slots, [task.length for task in new])
        writes.fill(target["max_think_lens"], slots, -1)
        writes.fill(target["limit_think_status"], slots, 0)

    def restarts(self, tasks: Sequence[Task], read: Read) -> bool:
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

    def book(self, tasks: Sequence[Task], num_running_requests: int, decodes: bool, restarts: bool) -> None:
        """Set ``not_need_stop`` if a request has entered or a blocked slot restarts; make the cache at first use."""
        inputs = self.runner.share_inputs
        if "caches" not in inputs:
            self.runner.initialize_kv_cache()
        if restarts or any(task.kind == PREFILL for task in tasks):
            inputs["not_need_stop"][0] = True

    def book_proposer(self, own: Any) -> None:  # noqa: ANN401
        """Leave the proposer's map of slots: this runner passes none."""


def method_of(runner: Runner) -> str:
    """Return the name of the runner's draft method, "" for none."""
    return str(getattr(runner.spec_method, "value", runner.spec_method) or "").lower()
