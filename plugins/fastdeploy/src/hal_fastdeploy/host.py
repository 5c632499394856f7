"""What an insertion does on the host, beside tensors: lists and attributes of the runner and its proposer, and calls.

Each entry of the tables has the names that FastDeploy's function writes, sets or calls (:mod:`hal_fastdeploy.reading`),
and does the same for all tasks of a call. So the tables are the list of what is served, and what serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from .requests import DECODE, PREFILL, Task

Runner = Any
"""FastDeploy's model runner."""


@dataclass(slots=True)
class Call:
    """A call of ``insert_tasks_v1`` for the runner, or for its proposer.

    ``holder``: whose function it is; ``batch``: its batch; ``slots``: the runner's map of slots; ``restarts``: a DECODE
    task restarts a blocked slot.
    """

    holder: Any
    batch: Any
    requests: Any
    tasks: Sequence[Task]
    num_running_requests: int
    decodes: bool
    slots: Mapping[int, int]
    restarts: bool = False
    new: list[Task] = field(init=False)

    def __post_init__(self) -> None:
        self.new = [task for task in self.tasks if task.kind == PREFILL]


@dataclass(frozen=True, slots=True)
class Host:
    """``names`` of FastDeploy's function that ``act`` serves; None: the insertion does it where it writes tensors.

    ``first``: before the tensors are written, as in FastDeploy.
    """

    names: tuple[str, ...]
    what: str
    act: Callable[[Call], None] | None = None
    first: bool = False


def set_slots(tensor: Any, values: Mapping[int, Any]) -> None:  # noqa: ANN401 (a host array, or a framework's)
    """Write one value for each slot; equal values of neighbouring slots by one slice."""
    for _, run in groupby(enumerate(sorted(values)), lambda at: (at[1] - at[0], values[at[1]])):
        slots = [slot for _, slot in run]
        tensor[slots[0] : slots[-1] + 1] = values[slots[0]]


def method_of(runner: Runner) -> str:
    """Return the name of the runner's draft method, "" for none. The XPU's runner of 2.6 has another attribute."""
    method = runner.spec_method if hasattr(runner, "spec_method") else getattr(runner, "speculative_method", None)
    return str(getattr(method, "value", method) or "").lower()


def _tokens(tokens: Sequence[Any]) -> list[int]:
    return [*map(int, tokens)]


# Both runners --------------------------------------------------------------------------------------------------------


def _listed(name: str, given: str, default: float) -> Host:
    """A list beside a tensor: the sampler reads it without asking the device."""

    def act(call: Call) -> None:
        if name in call.batch:
            held = call.batch[name]
            for task in call.new:
                held[task.slot] = task.request.get(given, default)

    return Host((f"share_inputs.{name}",), f"the request's {given}", act)


def _running(batch: str) -> Host:
    def act(call: Call) -> None:
        call.batch["num_running_requests"] = call.num_running_requests
        call.batch["running_requests_ids"] = range(call.num_running_requests)

    names = f"{batch}.num_running_requests", f"{batch}.running_requests_ids"
    return Host(names, "the call's number and a range of it, which a reordering of slots (FD_PD_REORDER=1) reads", act)


def _preempted(call: Call) -> None:
    values = {task.slot: int(task.kind not in (PREFILL, DECODE)) for task in call.tasks}
    set_slots(call.batch["preempted_idx"], values)


def _exist_prefill(call: Call) -> None:
    if call.new:
        call.holder.exist_prefill_flag = not call.decodes


def _prompt_logprobs(call: Call) -> None:
    for task in call.new:
        _keep_prompt_logprobs(call, task)


def _keep_prompt_logprobs(call: Call, task: Task) -> None:
    parameters = getattr(task.request, "sampling_params", None)  # None for pooling
    if getattr(parameters, "prompt_logprobs", None) is not None:
        call.holder.prompt_logprobs_reqs[task.request.request_id] = task.request


def _no_logits_processor(call: Call) -> None:
    sampler: Any = getattr(call.holder, "sampler", None)
    if hasattr(sampler, "apply_logits_processor"):
        for task in call.new:
            sampler.apply_logits_processor(task.slot, None, [])


def _make_cache(call: Call) -> None:
    if "caches" not in call.batch:
        call.holder.initialize_kv_cache()


COMMON = (
    Host(("share_inputs.preempted_idx",), "1 for a leaving request, else 0", _preempted),
    _listed("top_k_list", "top_k", 0),
    _listed("min_p_list", "min_p", 0.0),
    Host(
        ("self.sampler.apply_logits_processor()",),
        "called with None, as for each request without guided decoding",
        _no_logits_processor,
    ),
    Host(("self.proposer.insert_tasks_v1()",), "the proposer's tensors are in the same plan"),
)


# The GPU's -----------------------------------------------------------------------------------------------------------


def _names(call: Call) -> None:
    held = call.batch["req_ids"]
    for task in call.tasks:
        held[task.slot] = str(task.request.request_id)


def _chunks(call: Call) -> None:
    set_slots(call.batch["is_chunk_step"], {task.slot: not task.ends_prefill for task in call.new})


def _arguments(call: Call) -> None:
    held = call.batch["logits_processors_args"]
    for task in call.new:
        held[task.slot] = task.request.get("logits_processors_args") or {}


def _forwarded(call: Call) -> None:
    held = call.holder.forward_batch_reqs_list
    for task in call.tasks:
        if task.kind != DECODE:
            held[task.slot] = task.request if task.kind == PREFILL else None


def _prompt_logprobs_until_left(call: Call) -> None:
    runner = call.holder
    for task in call.tasks:
        if task.kind == PREFILL:
            _keep_prompt_logprobs(call, task)
        elif task.kind != DECODE:
            runner.prompt_logprobs_reqs.pop(task.request.request_id, None)
            runner.in_progress_prompt_logprobs.pop(task.request.request_id, None)


def _counted(call: Call) -> None:
    runner = call.holder
    if call.decodes and runner._cached_launch_token_num != -1:
        drafts = int(runner.speculative_config.num_speculative_tokens) if runner.speculative_decoding else 0
        runner._cached_launch_token_num += (drafts + 1) * len(call.new)
        runner._cached_real_bsz += len(call.new)


def _not_pooled(call: Call) -> None:
    if call.new:
        call.holder.pooling_params = []


def _start_suffix(call: Call) -> None:
    if method_of(call.holder) == "suffix" and call.holder.proposer is not None:
        for task in call.new:
            prompt = _tokens(task.request.prompt_token_ids)
            call.holder.proposer.start_request(task.slot, task.request.request_id, prompt)


def _log_prefills(call: Call) -> None:
    if (logger := getattr(call.holder, "deterministic_logger", None)) is not None:
        for task in call.new:
            request, end = task.request, task.start + task.length
            tokens = _tokens([*request.prompt_token_ids, *request.output_token_ids])
            logger.log_prefill_input(request.request_id, task.slot, task.start, end, tokens)


def _swap(call: Call) -> None:
    if getattr(call.holder, "enable_cache_manager_v1", False):
        of = call.requests
        call.holder.cache_controller.submit_swap_tasks(of.cache_evict_metadata, of.cache_swap_metadata)


def _view(call: Call) -> None:
    call.batch["seq_lens_this_time"] = call.batch["seq_lens_this_time_buffer"][: call.num_running_requests]


GPU = (
    Host(
        ("self.cache_controller.submit_swap_tasks()",),
        "with ENABLE_V1_KVCACHE_MANAGER=1, after the checks and before the tensors",
        _swap,
        first=True,
    ),
    _running("share_inputs"),
    Host(("share_inputs.get_index_by_batch_id()", "share_inputs.index_to_batch_id"), "called for new batch ids"),
    *COMMON,
    _listed("top_p_list", "top_p", 0.7),
    Host(("share_inputs.req_ids",), "the request's name, for each kind of task", _names),
    Host(("share_inputs.is_chunk_step",), "whether the prefill goes on after this piece", _chunks),
    Host(("share_inputs.logits_processors_args",), "the request's", _arguments),
    Host(("share_inputs.seq_lens_this_time",), "a view of the first rows of seq_lens_this_time_buffer", _view),
    Host(("self.exist_prefill_flag",), "True with a prefill, False with one of the decode role", _exist_prefill),
    Host(("self.forward_batch_reqs_list",), "the request, None when it leaves", _forwarded),
    Host(
        (
            "self.prompt_logprobs_reqs",
            "self.prompt_logprobs_reqs.pop()",
            "self.in_progress_prompt_logprobs.pop()",
        ),
        "kept until the request leaves",
        _prompt_logprobs_until_left,
    ),
    Host(("self._cached_launch_token_num", "self._cached_real_bsz"), "grow with the decode role", _counted),
    Host(("self.pooling_params",), "an empty list with a prefill; pooling is FastDeploy's", _not_pooled),
    Host(("self.proposer.start_request()",), "of the suffix method", _start_suffix),
    Host(("self.deterministic_logger.log_prefill_input()",), "if there is a logger", _log_prefills),
)


# The XPU's -----------------------------------------------------------------------------------------------------------


def _goes_on(call: Call) -> None:
    if call.restarts or call.new:
        call.batch["not_need_stop"][0] = True


XPU = (
    Host(("self.initialize_kv_cache()",), "at the first call", _make_cache, first=True),
    *COMMON,
    Host(("share_inputs.not_need_stop",), "True with a prefill, or if a blocked slot restarts", _goes_on),
    Host(("self.prompt_logprobs_reqs",), "kept", _prompt_logprobs),
)


# An MTP proposer's ---------------------------------------------------------------------------------------------------


def _map_slots(call: Call) -> None:
    own = call.batch
    if call.slots:
        own.index_to_batch_id = dict(call.slots)
    known = set(own.index_to_batch_id.values())
    for task in call.tasks:
        if task.request.idx not in known:
            own.get_index_by_batch_id(task.request.idx)
            known.add(task.request.idx)


def _input_lengths(call: Call) -> None:
    set_slots(call.batch["input_ids_len"], {task.slot: task.length - 1 for task in call.new})


def _inputs_for_ngrams(call: Call) -> None:
    if getattr(call.holder, "hybrid_mode", False) and "input_ids_cpu" in call.batch:
        held = call.batch["input_ids_cpu"]
        for task in call.new:
            request, end = task.request, task.start + task.length
            tokens = [*request.prompt_token_ids, *request.output_token_ids][task.start + 1 : end]
            if tokens:
                held[task.slot, : len(tokens)] = np.array(tokens, np.int64)


def _whole_view(call: Call) -> None:
    call.batch["seq_lens_this_time"] = call.batch["seq_lens_this_time_buffer"]


PROPOSER = (
    Host(("self.initialize_kv_cache()",), "if the proposer has no cache yet", _make_cache, first=True),
    _running("model_inputs"),
    Host(
        ("model_inputs.index_to_batch_id", "model_inputs.get_index_by_batch_id()"),
        "the GPU's runner passes its map; the XPU's has none",
        _map_slots,
    ),
    Host(("model_inputs.input_ids_len",), "the piece without its first token", _input_lengths),
    Host(
        ("model_inputs.input_ids_cpu",),
        "the same tokens on the host, for MTP with n-grams",
        _inputs_for_ngrams,
    ),
    Host(("model_inputs.seq_lens_this_time",), "the whole buffer", _whole_view),
    Host(("self.exist_prefill_flag",), "as the runner's; its blocking path depends on it", _exist_prefill),
)
