"""FastDeploy's model runners as insertions see them: their tensors, their slots and their host data.

The GPU's and the XPU's runner differ in what a prefill writes, and in their host lists. Everything else is
:class:`hal_fastdeploy.insertion.Insertion`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from hal_core import Writes

from .batches import TARGET, XPU_TARGET, Places
from .columns import Prefills
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
        target.ragged(writes, "token_ids_all", new.slots, new.history)
        writes.fill(target["token_ids_all"], new.slots, -1, new.prompts)

    def restarts(self, tasks: Sequence[Task], read: Read) -> bool:
        """Return False: nothing depends on slots that a DECODE task restarts."""
        return False

    def book(self, tasks: Sequence[Task], num_running_requests: int, decodes: bool, restarts: bool) -> None:
        """Write the host lists and attributes, in the requests' order."""
        runner, inputs = self.runner, self.runner.share_inputs
        names, entered, arguments = inputs["req_ids"], runner.forward_batch_reqs_list, inputs["logits_processors_args"]
        suffix, chunks, new = method_of(runner) == "suffix", dict[int, bool](), 0
        for task in tasks:
            request, slot = task.request, task.slot
            if task.kind == PREFILL:
                new += 1
                names[slot], entered[slot], chunks[slot] = request.request_id, request, not task.ends_prefill
                arguments[slot] = request.get("logits_processors_args") or {}
                if suffix:
                    runner.proposer.start_request(slot, request.request_id, [*map(int, request.prompt_token_ids)])
                runner.sampler.apply_logits_processor(slot, None, [])
            elif task.kind != DECODE:
                runner.prompt_logprobs_reqs.pop(request.request_id, None)
                runner.in_progress_prompt_logprobs.pop(request.request_id, None)
                entered[slot] = None
        set_slots(inputs["is_chunk_step"], chunks)
        if new:
            runner.exist_prefill_flag = not decodes
        if decodes and runner._cached_launch_token_num != -1:
            drafts = int(runner.speculative_config.num_speculative_tokens) if runner.speculative_decoding else 0
            runner._cached_launch_token_num += (drafts + 1) * new
            runner._cached_real_bsz += new
        inputs["seq_lens_this_time"] = inputs["seq_lens_this_time_buffer"][:num_running_requests]

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

    def finder(self) -> Callable[[int], int]:
        """Return a function from batch id to slot, which are the same."""
        return int

    def drafts_of(self, task_length: int) -> int:
        """Return how many draft tokens a prefill of the decode role brings: one more than its tokens."""
        return task_length + 1

    def write(self, writes: Writes, target: Places, new: Prefills) -> None:
        """Write first tokens and lengths again, and take thinking limits off."""
        target.column(writes, "first_token_ids", new.slots, new.firsts)
        target.column(writes, "ori_seq_lens_encoder", new.slots, new.lengths)
        writes.fill(target["max_think_lens"], new.slots, -1)
        writes.fill(target["limit_think_status"], new.slots, 0)

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


def set_slots(tensor: Any, values: Mapping[int, Any]) -> None:  # noqa: ANN401 (a host array, or a framework's)
    """Write one value for each slot; equal values of neighbouring slots by one slice."""
    for _, run in groupby(enumerate(sorted(values)), lambda at: (at[1] - at[0], values[at[1]])):
        slots = [slot for _, slot in run]
        tensor[slots[0] : slots[-1] + 1] = values[slots[0]]


def method_of(runner: Runner) -> str:
    """Return the name of the runner's draft method, "" for none."""
    return str(getattr(runner.spec_method, "value", runner.spec_method) or "").lower()
