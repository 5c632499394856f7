"""What an insertion does on the host, beside tensors: lists and attributes of the runner and its proposer, and calls.

Each entry of the tables has the names that FastDeploy's function writes, sets or calls (:mod:`hal_fastdeploy.reading`),
and does the same for all tasks of a call. So the tables are the list of what is served, and what serves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from .requests import DECODE, PREFILL, Task

Runner = Any
"""FastDeploy's model runner."""


@dataclass(slots=True)
class Call:
    """A call of ``insert_tasks_v1`` of ``holder``, the runner or its proposer, with its ``batch``.

    ``slots``: the runner's map of slots. ``restarts``: a DECODE task restarts a blocked slot.
    """

    hosts: Sequence[Host]
    holder: Any
    batch: Any
    requests: Any
    tasks: Sequence[Task]
    num_running_requests: int
    decodes: bool
    slots: Mapping[int, int]
    restarts: bool

    @property
    def new(self) -> list[Task]:
        """The prefills."""
        return [task for task in self.tasks if task.kind == PREFILL]

    def act(self, first: bool = False) -> None:
        """Serve the names that come before the tensors, or those behind."""
        for one in self.hosts:
            if one.first is first and one.act is not None:
                one.act(self)


@dataclass(frozen=True, slots=True)
class Host:
    """The names of FastDeploy's function that ``act`` serves. None: they are served where tensors are written.

    ``first``: before the tensors are written, as in FastDeploy.
    """

    names: tuple[str, ...]
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


def _tokens(task: Task) -> list[int]:
    return [*map(int, task.request.prompt_token_ids), *map(int, task.request.output_token_ids)]


# Ways of writing -----------------------------------------------------------------------------------------------------


def _set(name: str, value: Callable[[Call], Any], prefills: bool = False) -> Host:
    """An attribute, or an entry of the batch; ``prefills``: only in a call with one."""
    of, _, key = name.partition(".")

    def act(call: Call) -> None:
        if prefills and not call.new:
            return
        if of == "self":
            setattr(call.holder, key, value(call))
        else:
            call.batch[key] = value(call)

    return Host((name,), act)


def _running(batch: str) -> tuple[Host, Host]:
    """What a reordering of slots (FD_PD_REORDER=1) reads."""
    return (
        _set(f"{batch}.num_running_requests", lambda call: call.num_running_requests),
        _set(f"{batch}.running_requests_ids", lambda call: range(call.num_running_requests)),
    )


def _listed(name: str, value: Callable[[Task], Any], prefills: bool = True) -> Host:
    """A list with an entry for each slot, which some versions have."""

    def act(call: Call) -> None:
        if name in call.batch:
            held = call.batch[name]
            for task in call.new if prefills else call.tasks:
                held[task.slot] = value(task)

    return Host((f"share_inputs.{name}",), act)


def _in_slots(name: str, value: Callable[[Task], Any], prefills: bool = True) -> Host:
    """A tensor on the host."""
    entry = name.partition(".")[2]

    def act(call: Call) -> None:
        set_slots(call.batch[entry], {task.slot: value(task) for task in (call.new if prefills else call.tasks)})

    return Host((name,), act)


def _make_cache(call: Call) -> None:
    if "caches" not in call.batch:
        call.holder.initialize_kv_cache()


def _no_logits_processor(call: Call) -> None:
    if (apply := getattr(call.holder.sampler, "apply_logits_processor", None)) is not None:
        for task in call.new:
            apply(task.slot, None, [])


CACHE = Host(("self.initialize_kv_cache()",), _make_cache, first=True)
PREFILLS = _set("self.exist_prefill_flag", lambda call: not call.decodes, prefills=True)
COMMON = (
    _in_slots("share_inputs.preempted_idx", lambda task: int(task.kind not in (PREFILL, DECODE)), prefills=False),
    _listed("top_k_list", lambda task: task.request.get("top_k", 0)),
    _listed("min_p_list", lambda task: task.request.get("min_p", 0.0)),
    Host(("self.sampler.apply_logits_processor()",), _no_logits_processor),
    Host(("self.proposer.insert_tasks_v1()",)),
)


# The GPU's runner ----------------------------------------------------------------------------------------------------


def _swap(call: Call) -> None:
    if getattr(call.holder, "enable_cache_manager_v1", False):
        of = call.requests
        call.holder.cache_controller.submit_swap_tasks(of.cache_evict_metadata, of.cache_swap_metadata)


def _forwarded(call: Call) -> None:
    for task in call.tasks:
        if task.kind != DECODE:
            call.holder.forward_batch_reqs_list[task.slot] = task.request if task.kind == PREFILL else None


def _prompt_logprobs(call: Call, pops: bool = True) -> None:
    for task in call.tasks:
        name, parameters = task.request.request_id, getattr(task.request, "sampling_params", None)  # None for pooling
        if task.kind == PREFILL and getattr(parameters, "prompt_logprobs", None) is not None:
            call.holder.prompt_logprobs_reqs[name] = task.request
        elif pops and task.kind not in (PREFILL, DECODE):
            call.holder.prompt_logprobs_reqs.pop(name, None)
            call.holder.in_progress_prompt_logprobs.pop(name, None)


def _counted(call: Call) -> None:
    runner = call.holder
    if call.decodes and runner._cached_launch_token_num != -1:
        drafts = int(runner.speculative_config.num_speculative_tokens) if runner.speculative_decoding else 0
        runner._cached_launch_token_num += (drafts + 1) * len(call.new)
        runner._cached_real_bsz += len(call.new)


def _start_suffix(call: Call) -> None:
    if method_of(call.holder) == "suffix" and call.holder.proposer is not None:
        for task in call.new:
            call.holder.proposer.start_request(task.slot, task.request.request_id, _tokens(task)[: task.prompt])


def _log_prefills(call: Call) -> None:
    if (logger := getattr(call.holder, "deterministic_logger", None)) is not None:
        for task in call.new:
            end = task.start + task.length
            logger.log_prefill_input(task.request.request_id, task.slot, task.start, end, _tokens(task))


LOGPROBS = ("self.prompt_logprobs_reqs", "self.prompt_logprobs_reqs.pop()", "self.in_progress_prompt_logprobs.pop()")
GPU = (
    Host(("self.cache_controller.submit_swap_tasks()",), _swap, first=True),
    Host(("share_inputs.get_index_by_batch_id()", "share_inputs.index_to_batch_id")),
    *_running("share_inputs"),
    *COMMON,
    _listed("top_p_list", lambda task: task.request.get("top_p", 0.7)),
    _listed("req_ids", lambda task: str(task.request.request_id), prefills=False),
    _listed("logits_processors_args", lambda task: task.request.get("logits_processors_args") or {}),
    _in_slots("share_inputs.is_chunk_step", lambda task: not task.ends_prefill),
    _set(
        "share_inputs.seq_lens_this_time",
        lambda call: call.batch["seq_lens_this_time_buffer"][: call.num_running_requests],
    ),
    PREFILLS,
    Host(("self.forward_batch_reqs_list",), _forwarded),
    Host(LOGPROBS, _prompt_logprobs),
    Host(("self._cached_launch_token_num", "self._cached_real_bsz"), _counted),
    _set("self.pooling_params", lambda call: [], prefills=True),
    _set("share_inputs.pooling_params", lambda call: [], prefills=True),
    Host(("self.proposer.start_request()",), _start_suffix),
    Host(("self.deterministic_logger.log_prefill_input()",), _log_prefills),
)


# The XPU's runner, and an MTP proposer -------------------------------------------------------------------------------


def _goes_on(call: Call) -> None:
    if call.restarts or call.new:
        call.batch["not_need_stop"][0] = True


def _map_slots(call: Call) -> None:
    """Take the map that the GPU's runner passes; the XPU's has none."""
    own = call.batch
    if call.slots:
        own.index_to_batch_id = dict(call.slots)
    known = set(own.index_to_batch_id.values())
    for batch_id in dict.fromkeys(task.request.idx for task in call.tasks):
        if batch_id not in known:
            own.get_index_by_batch_id(batch_id)


def _inputs_for_ngrams(call: Call) -> None:
    if getattr(call.holder, "hybrid_mode", False) and "input_ids_cpu" in call.batch:
        for task in call.new:
            if tokens := _tokens(task)[task.start + 1 : task.start + task.length]:
                call.batch["input_ids_cpu"][task.slot, : len(tokens)] = np.array(tokens, np.int64)


XPU = (
    CACHE,
    *COMMON,
    Host(("share_inputs.not_need_stop",), _goes_on),
    Host(LOGPROBS[:1], lambda call: _prompt_logprobs(call, pops=False)),
)
PROPOSER = (
    CACHE,
    *_running("model_inputs"),
    Host(("model_inputs.index_to_batch_id", "model_inputs.get_index_by_batch_id()"), _map_slots),
    _in_slots("model_inputs.input_ids_len", lambda task: task.length - 1),
    Host(("model_inputs.input_ids_cpu",), _inputs_for_ngrams),
    _set("model_inputs.seq_lens_this_time", lambda call: call.batch["seq_lens_this_time_buffer"]),
    PREFILLS,
)
