"""Stand-ins for FastDeploy's classes: requests, batches of tensors, and the reference writer of an insertion.

Written from the facts about FastDeploy's sources, and without code of the product: not even its tables of tensors.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View

PREFILL, DECODE, PREEMPTED, EXTEND, ABORT = range(5)
SIZES = {"n": 4, "L": 24, "C": 24, "E": 2, "V": 16, "Q": 3, "q": 4, "B": 6}
DRAFTS = 3
# An InputBatch's tensors that an insertion writes: name, type, shape, value at the start.
INPUT_BATCH = """
token_ids_all i64 n,L -1 | input_ids i64 n,C 0 | prompt_lens i64 n,1 0 | step_idx i64 n,1 0 | eos_token_id i64 E,1 0
seq_lens_encoder i32 n 0 | seq_lens_decoder i32 n 0 | encoder_block_lens i32 n 0 | block_tables i32 n,B -1
step_seq_lens_decoder i32 n,1 0 | is_block_step bool n 0 | stop_flags bool n,1 1 | infer_seed i64 n,1 0
top_p f32 n,1 0.7 | top_k i64 n,1 0 | min_p f32 n,1 0 | temperature f32 n,1 0.95
penalty_score f32 n,1 1 | frequency_score f32 n,1 0 | presence_score f32 n,1 0
temp_scaled_logprobs bool n,1 0 | top_p_normalized_logprobs bool n,1 0
min_dec_len i64 n,1 1 | max_dec_len i64 n,1 24 | bad_tokens i64 n,V -1 | bad_tokens_len i64 n 1
stop_seqs_len i32 n,Q 0 | stop_seqs i64 n,Q,q -1
"""
GPU_ALONE = "seq_lens_this_time_buffer i32 n 0 | generated_modality i32 n -1"
XPU_ALONE = """
seq_lens_this_time i32 n 0 | first_token_ids i64 n,1 -1 | ori_seq_lens_encoder i32 n,1 0
max_think_lens i32 n,1 -1 | limit_think_status i32 n,1 0
"""
DRAFTED = "draft_tokens i64 n,D 0"
PROPOSER_BATCH = """
pre_ids i64 n,L -1 | input_ids i64 n,C 0 | encoder_block_lens i32 n 0 | block_tables i32 n,B -1
stop_flags bool n,1 1 | batch_drop bool n,1 0 | is_block_step bool n,1 0 | step_idx i64 n,1 0
seq_lens_encoder i32 n 0 | seq_lens_decoder i32 n 0 | seq_lens_this_time_buffer i32 n 0
recompute_token_num i32 n,1 2 | mask_rollback i32 n,1 0
"""
TYPES = {"i64": np.int64, "i32": np.int32, "f32": np.float32, "bool": np.bool_}


class Request:
    """An upstream request: attributes, and ``get`` with a default for a missing one."""

    def __init__(self, kind, idx, request_id, **values):
        self.task_type, self.idx, self.request_id = SimpleNamespace(value=kind), idx, request_id
        self.values = values.pop("values", {})
        self.sampling_params = SimpleNamespace(prompt_logprobs=None)
        for name, value in values.items():
            setattr(self, name, value)

    def get(self, name, default=None):
        return self.values.get(name, default)


class Batch:
    """An InputBatch: tensors and host lists by name, with the map of batch ids."""

    def __init__(self, tensors, host):
        self.data = {**tensors, **host}
        self.index_to_batch_id = {}

    def __contains__(self, name):
        return name in self.data

    def __getitem__(self, name):
        return self.data[name]

    def __setitem__(self, name, value):
        self.data[name] = value

    def get_index_by_batch_id(self, batch_id):
        for index, known in self.index_to_batch_id.items():
            if known == batch_id:
                return index
        self.index_to_batch_id[batch_id] = batch_id
        return batch_id


def arrays(*tables):
    """The tensors of some tables as NumPy arrays, by name, as they are at the start."""
    sizes = SIZES | {"D": DRAFTS + 1, "1": 1}
    found = {}
    for line in "|".join(tables).replace("\n", "|").split("|"):
        if line.strip():
            name, kind, letters, value = line.split()
            found[name] = np.full([sizes[letter] for letter in letters.split(",")], float(value), TYPES[kind])
    return found


def used(arrays):
    """The arrays with a value that no insertion writes, as after steps of other requests."""
    for array in arrays.values():
        array[...] = 77
    return arrays


def target_arrays(method="", kind="gpu"):
    """The tensors of a runner's ``share_inputs``."""
    return arrays(INPUT_BATCH, GPU_ALONE if kind == "gpu" else XPU_ALONE, DRAFTED if method else "")


def proposer_arrays(method):
    """The tensors of an MTP proposer's inputs; none for another method."""
    return arrays(PROPOSER_BATCH) if method == "mtp" else {}


def host_of_target(kind="gpu"):
    n = SIZES["n"]
    lists = {name: [None] * n for name in ("top_k_list", "min_p_list")}
    lists["preempted_idx"] = np.zeros((n, 1), np.int32)
    if kind == "xpu":
        return lists | {"not_need_stop": np.zeros(1, np.bool_)}
    lists |= {name: [None] * n for name in ("req_ids", "logits_processors_args")}
    return lists | {"is_chunk_step": np.zeros(n, np.bool_)}


def runner_of(tensors, proposer=None, *, method="", role="mixed", cached=-1, kind="gpu"):
    """A runner as an insertion sees it. ``tensors``: of the target, by name."""
    calls = []
    runner = SimpleNamespace(
        share_inputs=Batch(tensors, host_of_target(kind)),
        speculative_decoding=bool(method),
        spec_method=method or None,
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
        scheduler_config=SimpleNamespace(splitwise_role=role),
        proposer=SimpleNamespace(start_request=lambda *given: calls.append(("suffix", *given))),
        prompt_logprobs_reqs={},
        in_progress_prompt_logprobs={},
        calls=calls,
    )
    if kind == "gpu":
        runner.exist_prefill_flag = None
        runner._cached_launch_token_num, runner._cached_real_bsz = cached, 2 if cached != -1 else -1
        runner.forward_batch_reqs_list = [None] * SIZES["n"]
        runner.sampler = SimpleNamespace(apply_logits_processor=lambda *given: calls.append(("sampler", *given)))
    else:
        runner.initialize_kv_cache = lambda: runner.share_inputs.data.setdefault("caches", [])
    if proposer:
        runner.proposer.model_inputs = Batch(proposer, {"input_ids_len": np.zeros((SIZES["n"], 1), np.int64)})
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


def insert(runner, requests, num_running):
    """Write over NumPy arrays what upstream's GPU runner leaves."""
    inputs = runner.share_inputs
    for request in requests:
        slot = inputs.get_index_by_batch_id(request.idx)
        kind = request.task_type.value
        if kind == PREFILL:
            prefill(runner, copy.deepcopy(request), slot)
            book_prefill(runner, request, slot)
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
        runner.proposer.model_inputs.index_to_batch_id = dict(inputs.index_to_batch_id)
        propose(runner, requests, num_running)


def insert_xpu(runner, requests, num_running):
    """Write over NumPy arrays what upstream's XPU runner leaves."""
    inputs, goes = runner.share_inputs, False
    runner.initialize_kv_cache()
    for request in requests:
        slot, kind = request.idx, request.task_type.value
        if kind == PREFILL:
            prefill(runner, copy.deepcopy(request), slot, xpu=True)
            goes = True
        elif kind == DECODE:
            goes = goes or bool(inputs["is_block_step"][slot])
            grow(inputs, slot, request)
        else:
            leave(inputs, slot, "seq_lens_this_time")
        inputs["preempted_idx"][slot] = kind not in (PREFILL, DECODE)
    if goes:
        inputs["not_need_stop"][0] = True
    if runner.spec_method == "mtp":
        propose(runner, requests, num_running)


def grow(inputs, slot, request):
    """Replace the block table; a shorter list shrinks it."""
    inputs["encoder_block_lens"][slot] = len(request.block_tables)
    inputs["block_tables"][slot] = [*request.block_tables, *[-1] * (SIZES["B"] - len(request.block_tables))]


def leave(inputs, slot, lengths):
    inputs["block_tables"][slot], inputs["stop_flags"][slot], inputs["is_block_step"][slot] = -1, True, False
    inputs[lengths][slot] = inputs["seq_lens_decoder"][slot] = inputs["seq_lens_encoder"][slot] = 0


def prefill(runner, request, slot, xpu=False):
    """The facts' steps 2, 4, 6 and 7 for the target's tensors."""
    inputs, start, end = runner.share_inputs, request.prefill_start_index, request.prefill_end_index
    prompt = [*map(int, request.prompt_token_ids)]
    everything, length = [*prompt, *map(int, request.output_token_ids)], end - start
    lengths = inputs["seq_lens_this_time" if xpu else "seq_lens_this_time_buffer"]
    if xpu:
        inputs["max_think_lens"][slot], inputs["limit_think_status"][slot] = -1, 0
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
            count = length + 1 if xpu else 2
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


def propose(runner, requests, num_running):
    """The writes of the MTP proposer's own function."""
    own = runner.proposer.model_inputs
    own["num_running_requests"], own["running_requests_ids"] = num_running, range(num_running)
    for request in requests:
        kind, slot = request.task_type.value, request.idx
        if hasattr(runner, "forward_batch_reqs_list"):  # the GPU's runner passes its map of slots
            slot = runner.share_inputs.get_index_by_batch_id(request.idx)
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
            grow(own, slot, request)
            own["stop_flags"][slot] = own["batch_drop"][slot] = False
            own["seq_lens_decoder"][slot], own["seq_lens_encoder"][slot] = start, 0 if decodes else length
            own["seq_lens_this_time_buffer"][slot] = length + 1 if decodes else length
            own["step_idx"][slot] = len(request.output_token_ids) if end >= len(everything) else 0
            if decodes:
                own["recompute_token_num"][slot], own["mask_rollback"][slot] = 0, 1
    own["seq_lens_this_time"] = own["seq_lens_this_time_buffer"]
