"""The reference writer of an insertion, and tensors on a device for stand-ins of FastDeploy's classes.

Written from the facts about FastDeploy's sources. The stand-ins are those of the comparison of runners, of which the
insertion uses none.
"""

import copy
from types import SimpleNamespace

import numpy as np
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_fastdeploy.standins import ABORT as ABORT
from hal_fastdeploy.standins import DECODE as DECODE
from hal_fastdeploy.standins import DRAFTS as DRAFTS
from hal_fastdeploy.standins import EXTEND as EXTEND
from hal_fastdeploy.standins import PREEMPTED as PREEMPTED
from hal_fastdeploy.standins import PREFILL as PREFILL
from hal_fastdeploy.standins import SIZES as SIZES
from hal_fastdeploy.standins import XPU_ALONE as XPU_ALONE
from hal_fastdeploy.standins import Batch, recorded
from hal_fastdeploy.standins import Request as Request
from hal_fastdeploy.standins import arrays as arrays
from hal_fastdeploy.standins import runner_of as runner_alone
from hal_fastdeploy.standins import target_arrays as target_arrays
from hal_fastdeploy.standins import used as used

PROPOSER_BATCH = """
pre_ids i64 n,L -1 | input_ids i64 n,C 0 | encoder_block_lens i32 n 0 | block_tables i32 n,B -1
stop_flags bool n,1 1 | batch_drop bool n,1 0 | is_block_step bool n,1 0 | step_idx i64 n,1 0
seq_lens_encoder i32 n 0 | seq_lens_decoder i32 n 0 | seq_lens_this_time_buffer i32 n 0
recompute_token_num i32 n,1 2 | mask_rollback i32 n,1 0
"""


class BatchRequest(list):
    """The requests of one call, with what the cache manager moves before."""

    cache_evict_metadata, cache_swap_metadata = "evicted", "swapped"


def proposer_arrays(method):
    """The tensors of an MTP proposer's inputs; none for another method."""
    return arrays(PROPOSER_BATCH) if method == "mtp" else {}


def runner_of(tensors, proposer=None, **options):
    """A runner with a proposer. ``proposer``: the tensors of an MTP proposer's inputs, by name."""
    runner = runner_alone(tensors, **options)
    held = runner.proposer = SimpleNamespace(start_request=recorded(runner.calls, "suffix"), exist_prefill_flag=None)
    held.hybrid_mode = False
    if proposer:
        n, most = SIZES["n"], SIZES["L"]
        own = {"input_ids_len": np.zeros((n, 1), np.int64), "input_ids_cpu": np.full((n, most), -1)}
        batch = held.model_inputs = Batch(proposer, own)
        held.initialize_kv_cache = lambda: batch.data.setdefault("caches", [])
    return runner


class OnDevice:
    """Tensors on a device, each a memory of its own, with the values of ``arrays``."""

    def __init__(self, bound, arrays):
        self.bound, self.views = bound, {}
        for name, array in arrays.items():
            memory = bound.device.allocate(array.nbytes)
            self.views[name] = view = View.contiguous(memory, 0, array.shape, dtype_of(array.dtype))
            bound.async_set_value(target=view, value=array, stream=bound.default_stream).wait()

    def read(self):
        """Every array as it is now."""
        found = {}
        for name, view in self.views.items():
            part = ByteRange(0, view.size * view.dtype.itemsize)
            copied = self.bound.copy_out(memory=view.memory, parts=[part], stream=self.bound.default_stream)
            copied.wait()
            found[name] = copied.data[0].view(view.dtype.storage).reshape(view.shape)
        return found


# The reference: one request after another, one field after another, in the order of the facts' tables. ---------------

MORE = {
    # what only some versions of a function do, by kind of runner
    "gpu": {
        *("share_inputs.top_p_list", "self.cache_controller.submit_swap_tasks()"),
        *("self.pooling_params", "share_inputs.pooling_params"),
    },
    "xpu": {"share_inputs.pre_ids", "share_inputs.enable_thinking", "self.sampler.apply_logits_processor()"},
}


def insert(runner, requests, num_running, more=frozenset(MORE["gpu"])):
    """Write over NumPy arrays what upstream's GPU runner leaves. ``more``: of a version that does these things too."""
    inputs = runner.share_inputs
    inputs["num_running_requests"], inputs["running_requests_ids"] = num_running, range(num_running)
    if runner.enable_cache_manager_v1 and "self.cache_controller.submit_swap_tasks()" in more:
        runner.cache_controller.submit_swap_tasks(requests.cache_evict_metadata, requests.cache_swap_metadata)
    for request in requests:
        slot = inputs.get_index_by_batch_id(request.idx)
        inputs["req_ids"][slot] = str(request.request_id)
        kind = request.task_type.value
        if kind == PREFILL:
            prefill(runner, copy.deepcopy(request), slot)
            book_prefill(runner, request, slot)
            if "share_inputs.top_p_list" in more:
                inputs["top_p_list"][slot] = request.get("top_p", 0.7)
            if "self.pooling_params" in more:
                runner.pooling_params = []
            if "share_inputs.pooling_params" in more:
                inputs["pooling_params"] = []
        elif kind == DECODE:
            grow(inputs, slot, request)
        else:
            leave(inputs, slot, "seq_lens_this_time_buffer")
            runner.prompt_logprobs_reqs.pop(request.request_id, None)
            runner.in_progress_prompt_logprobs.pop(request.request_id, None)
            runner.forward_batch_reqs_list[slot] = None
        inputs["preempted_idx"][slot] = kind not in (PREFILL, DECODE)
    inputs["seq_lens_this_time"] = inputs["seq_lens_this_time_buffer"][:num_running]
    if runner.spec_method == "mtp":
        propose(runner, requests, num_running, inputs.index_to_batch_id)


def insert_xpu(runner, requests, num_running, more=frozenset(MORE["xpu"])):
    """Write over NumPy arrays what upstream's XPU runner leaves."""
    inputs, goes = runner.share_inputs, False
    runner.initialize_kv_cache()
    for request in requests:
        slot, kind = request.idx, request.task_type.value
        if kind == PREFILL:
            prefill(runner, copy.deepcopy(request), slot, more)
            if request.sampling_params.prompt_logprobs is not None:
                runner.prompt_logprobs_reqs[request.request_id] = request
            if "self.sampler.apply_logits_processor()" in more:
                runner.sampler.apply_logits_processor(slot, None, [])
            goes = True
        elif kind == DECODE:
            goes = goes or bool(inputs["is_block_step"][slot])
            grow(inputs, slot, request)
        else:
            leave(inputs, slot, "seq_lens_this_time")
        inputs["preempted_idx"][slot] = kind not in (PREFILL, DECODE)
    if goes:
        inputs["not_need_stop"][0] = True
    if "mtp" in (getattr(runner, "spec_method", None), getattr(runner, "speculative_method", None)):
        propose(runner, requests, num_running, None)


def grow(inputs, slot, request):
    """Replace the block table; a shorter list shrinks it."""
    inputs["encoder_block_lens"][slot] = len(request.block_tables)
    inputs["block_tables"][slot] = [*request.block_tables, *[-1] * (SIZES["B"] - len(request.block_tables))]


def leave(inputs, slot, lengths):
    inputs["block_tables"][slot], inputs["stop_flags"][slot], inputs["is_block_step"][slot] = -1, True, False
    inputs[lengths][slot] = inputs["seq_lens_decoder"][slot] = inputs["seq_lens_encoder"][slot] = 0


def limit_thinking(inputs, request, slot):
    """The GPU's rule: only for a request that says whether it thinks."""
    if request.get("enable_thinking") is not None:
        inputs["enable_thinking"][slot], inputs["limit_think_status"][slot] = request.get("enable_thinking"), 0
        for name, given in (("max_think_lens", "reasoning_max_tokens"), ("max_reply_lens", "response_max_tokens")):
            limited = request.get("enable_thinking") and request.get(given) is not None
            inputs[name][slot] = request.get(given) if limited else -1


def prefill(runner, request, slot, xpu=None):
    """The facts' steps 2, 4, 6 and 7 for the target's tensors. ``xpu``: what an XPU's version does beside."""
    inputs, start, end = runner.share_inputs, request.prefill_start_index, request.prefill_end_index
    prompt = [*map(int, request.prompt_token_ids)]
    everything, length = [*prompt, *map(int, request.output_token_ids)], end - start
    lengths = inputs["seq_lens_this_time" if xpu is not None else "seq_lens_this_time_buffer"]
    if xpu is None or "share_inputs.enable_thinking" in xpu:
        limit_thinking(inputs, request, slot)
    else:
        limited = request.get("enable_thinking", False) and request.get("reasoning_max_tokens") is not None
        inputs["max_think_lens"][slot] = request.get("reasoning_max_tokens") if limited else -1
        inputs["limit_think_status"][slot] = 0
    if xpu is not None:
        if "share_inputs.pre_ids" in xpu:
            inputs["pre_ids"][slot] = -1
        inputs["first_token_ids"][slot], inputs["ori_seq_lens_encoder"][slot] = everything[start], length
    else:
        inputs["token_ids_all"][slot] = prompt + [-1] * (SIZES["L"] - len(prompt))
    inputs["input_ids"][slot, :length] = everything[start:end]
    grow(inputs, slot, request)
    inputs["stop_flags"][slot], inputs["is_block_step"][slot] = False, False
    inputs["seq_lens_decoder"][slot], inputs["step_seq_lens_decoder"][slot] = start, 0
    lengths[slot] = inputs["seq_lens_encoder"][slot] = length
    inputs["prompt_lens"][slot] = len(everything)
    inputs["step_idx"][slot] = len(request.output_token_ids) if end >= len(everything) else 0
    if runner.scheduler_config.splitwise_role == "decode":
        inputs["seq_lens_encoder"][slot] = 0
        if runner.speculative_decoding:
            count = 2 if xpu is None else length + 1
            inputs["draft_tokens"][slot, :count], lengths[slot] = request.draft_token_ids[:count], count
    sample(inputs, request, slot)


def book_prefill(runner, request, slot):
    """The facts' steps 1 and 5, and their changes by the decode role: host lists and attributes of the GPU's."""
    inputs, decodes = runner.share_inputs, runner.scheduler_config.splitwise_role == "decode"
    total = len(request.prompt_token_ids) + len(request.output_token_ids)
    inputs["req_ids"][slot] = request.request_id
    inputs["is_chunk_step"][slot] = request.prefill_end_index < total
    inputs["logits_processors_args"][slot] = request.get("logits_processors_args") or {}
    runner.exist_prefill_flag = not decodes
    runner.forward_batch_reqs_list[slot] = request
    if request.sampling_params.prompt_logprobs is not None:
        runner.prompt_logprobs_reqs[request.request_id] = request
    if runner.deterministic_logger is not None:
        tokens = [*map(int, request.prompt_token_ids), *map(int, request.output_token_ids)]
        piece = request.prefill_start_index, request.prefill_end_index
        runner.deterministic_logger.log_prefill_input(request.request_id, slot, *piece, tokens)
    if runner.spec_method == "suffix":
        runner.proposer.start_request(slot, request.request_id, [*request.prompt_token_ids])
    if decodes and runner._cached_launch_token_num != -1:
        runner._cached_launch_token_num += DRAFTS + 1 if runner.speculative_decoding else 1
        runner._cached_real_bsz += 1
    runner.sampler.apply_logits_processor(slot, None, [])


#: Defaults of a request's attributes, and the tensors with a different name.
DEFAULTS = {"top_p": 0.7, "top_k": 0, "min_p": 0.0, "temperature": 0.95, "min_tokens": 1, "generated_modality": 0}
DEFAULTS |= {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
DEFAULTS |= {"temp_scaled_logprobs": False, "top_p_normalized_logprobs": False}
RENAMED = {"repetition_penalty": "penalty_score", "frequency_penalty": "frequency_score", "min_tokens": "min_dec_len"}
RENAMED |= {"presence_penalty": "presence_score", "max_tokens": "max_dec_len"}


def sample(inputs, request, slot):
    inputs["eos_token_id"][:, 0] = request.eos_token_ids
    for name, default in (DEFAULTS | {"max_tokens": SIZES["L"]}).items():
        if RENAMED.get(name, name) in inputs:
            inputs[RENAMED.get(name, name)][slot] = request.get(name, default)
    inputs["top_k_list"][slot], inputs["min_p_list"][slot] = request.get("top_k", 0), request.get("min_p", 0.0)
    if request.get("seed") is not None:
        inputs["infer_seed"][slot] = request.get("seed")
    if words := request.get("bad_words_token_ids"):
        inputs["bad_tokens"][slot, : len(words)], inputs["bad_tokens_len"][slot] = words, len(words)
    else:
        inputs["bad_tokens"][slot], inputs["bad_tokens_len"][slot] = -1, 1
    inputs["stop_seqs_len"][slot] = 0
    if request.get("stop_token_ids") and request.get("stop_seqs_len"):
        padded = [[*stop, *[-1] * (SIZES["q"] - len(stop))] for stop in request.get("stop_token_ids")]
        inputs["stop_seqs"][slot] = padded + [[-1] * SIZES["q"]] * (SIZES["Q"] - len(padded))
        inputs["stop_seqs_len"][slot, : len(padded)] = request.get("stop_seqs_len")


def propose(runner, requests, num_running, slots):
    """The writes of the MTP proposer's own function. ``slots``: the map that the GPU's runner passes."""
    proposer, own = runner.proposer, runner.proposer.model_inputs
    if "caches" not in own:
        proposer.initialize_kv_cache()
    own["num_running_requests"], own["running_requests_ids"] = num_running, range(num_running)
    if slots:
        own.index_to_batch_id = dict(slots)
    for request in requests:
        kind, slot = request.task_type.value, own.get_index_by_batch_id(request.idx)
        if kind == DECODE:
            grow(own, slot, request)
        elif kind != PREFILL:
            leave(own, slot, "seq_lens_this_time_buffer")
        else:
            start, end = request.prefill_start_index, request.prefill_end_index
            everything, length = [*request.prompt_token_ids, *request.output_token_ids], end - start
            decodes = runner.scheduler_config.splitwise_role == "decode"
            own["input_ids_len"][slot], own["pre_ids"][slot] = length - 1, -1
            own["input_ids"][slot, : length - 1] = everything[start + 1 : end]
            if proposer.hybrid_mode:
                own["input_ids_cpu"][slot, : length - 1] = everything[start + 1 : end]
            proposer.exist_prefill_flag = not decodes
            grow(own, slot, request)
            own["stop_flags"][slot] = own["batch_drop"][slot] = False
            own["seq_lens_decoder"][slot], own["seq_lens_encoder"][slot] = start, 0 if decodes else length
            own["seq_lens_this_time_buffer"][slot] = length + 1 if decodes else length
            own["step_idx"][slot] = len(request.output_token_ids) if end >= len(everything) else 0
            if decodes:
                own["recompute_token_num"][slot], own["mask_rollback"][slot] = 0, 1
    own["seq_lens_this_time"] = own["seq_lens_this_time_buffer"]
