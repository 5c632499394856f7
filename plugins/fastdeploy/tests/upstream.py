"""Stand-ins for FastDeploy's classes: requests, batches of tensors, and the reference writer of an insertion."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
from hal_core.memory.dtypes import dtype_of
from hal_core.memory.views import ByteRange, View
from hal_fastdeploy.batches import DRAFTED, PROPOSER, TARGET

PREFILL, DECODE, PREEMPTED, EXTEND, ABORT = range(5)
SIZES = {"n": 4, "L": 24, "C": 24, "E": 2, "V": 16, "Q": 3, "q": 4, "B": 6, "1": 1}
DRAFTS = 3
INIT = {
    "stop_flags": True,
    "bad_tokens_len": 1,
    "temperature": 0.95,
    "top_p": 0.7,
    "max_dec_len": 24,
    "draft_tokens": 0,
}


class Request:
    """An upstream request: attributes, and ``get`` with a default for those that it has not."""

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


def shape(letters):
    return tuple((SIZES | {"D": DRAFTS + 1})[letter] for letter in letters)


def arrays(table):
    return {name: np.full(shape(letters), INIT.get(name, -1), dtype) for name, (dtype, letters) in table.items()}


def host_of_target():
    n = SIZES["n"]
    lists = {name: [None] * n for name in ("req_ids", "top_k_list", "min_p_list", "logits_processors_args")}
    return lists | {"preempted_idx": np.zeros((n, 1), np.int32), "is_chunk_step": np.zeros(n, np.bool_)}


def runner_of(tensors, proposer=None, *, method="", role="mixed", cached=-1):
    """A runner as an insertion sees it. ``tensors``: of the target, by name."""
    calls = []
    runner = SimpleNamespace(
        share_inputs=Batch(tensors, host_of_target()),
        speculative_decoding=bool(method),
        spec_method=method or None,
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
        scheduler_config=SimpleNamespace(splitwise_role=role),
        exist_prefill_flag=None,
        _cached_launch_token_num=cached,
        _cached_real_bsz=2 if cached != -1 else -1,
        forward_batch_reqs_list=[None] * SIZES["n"],
        prompt_logprobs_reqs={},
        in_progress_prompt_logprobs={},
        sampler=SimpleNamespace(apply_logits_processor=lambda *given: calls.append(("sampler", *given))),
        proposer=SimpleNamespace(start_request=lambda *given: calls.append(("suffix", *given))),
        calls=calls,
    )
    if proposer is not None:
        runner.proposer.model_inputs = Batch(proposer, {"input_ids_len": np.zeros((SIZES["n"], 1), np.int64)})
    return runner


def tables(method):
    target = {**TARGET, **(DRAFTED if method else {})}
    return target, PROPOSER if method == "mtp" else {}


class OnDevice:
    """Tensors of one table on a device, each a memory of its own."""

    def __init__(self, bound, table):
        self.bound, self.views = bound, {}
        for name, array in arrays(table).items():
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


# The reference: one request after the other, one field after the other, as the facts' tables have it. -----------------


def insert(runner, requests, num_running):
    """What upstream's function leaves, over NumPy arrays."""
    inputs = runner.share_inputs
    for request in requests:
        slot = inputs.get_index_by_batch_id(request.idx)
        kind = request.task_type.value
        if kind == PREFILL:
            prefill(runner, copy.deepcopy(request), slot, request)
        elif kind == DECODE:
            inputs["encoder_block_lens"][slot] = len(request.block_tables)
            table(inputs, slot, request.block_tables)
            inputs["preempted_idx"][slot] = 0
        else:
            inputs["preempted_idx"][slot] = 1
            leave(inputs, slot)
            runner.prompt_logprobs_reqs.pop(request.request_id, None)
            runner.in_progress_prompt_logprobs.pop(request.request_id, None)
            runner.forward_batch_reqs_list[slot] = None
    inputs["seq_lens_this_time"] = inputs["seq_lens_this_time_buffer"][:num_running]
    if runner.spec_method == "mtp":
        propose(runner, requests, num_running)


def table(inputs, slot, blocks):
    inputs["block_tables"][slot] = -1
    inputs["block_tables"][slot, : len(blocks)] = blocks


def leave(inputs, slot):
    inputs["block_tables"][slot] = -1
    inputs["stop_flags"][slot] = True
    for name in ("seq_lens_this_time_buffer", "seq_lens_decoder", "seq_lens_encoder"):
        inputs[name][slot] = 0
    inputs["is_block_step"][slot] = False


def prefill(runner, request, slot, original):
    inputs, start, end = runner.share_inputs, request.prefill_start_index, request.prefill_end_index
    everything, length = request.prompt_token_ids + request.output_token_ids, end - start
    inputs["req_ids"][slot], inputs["preempted_idx"][slot] = request.request_id, 0
    inputs["token_ids_all"][slot] = -1
    inputs["token_ids_all"][slot, : len(request.prompt_token_ids)] = request.prompt_token_ids
    inputs["input_ids"][slot, :length] = everything[start:end]
    inputs["encoder_block_lens"][slot] = len(request.block_tables)
    table(inputs, slot, request.block_tables)
    inputs["stop_flags"][slot], inputs["is_block_step"][slot] = False, False
    inputs["seq_lens_decoder"][slot] = start
    inputs["seq_lens_this_time_buffer"][slot] = inputs["seq_lens_encoder"][slot] = length
    inputs["step_seq_lens_decoder"][slot], inputs["prompt_lens"][slot] = 0, len(everything)
    inputs["is_chunk_step"][slot] = end < len(everything)
    inputs["step_idx"][slot] = len(request.output_token_ids) if end >= len(everything) else 0
    runner.exist_prefill_flag = True
    runner.forward_batch_reqs_list[slot] = original
    if runner.spec_method == "suffix":
        runner.proposer.start_request(slot, request.request_id, request.prompt_token_ids)
    if runner.scheduler_config.splitwise_role == "decode":
        decode_role(runner, request, slot)
    sampling(inputs, request, slot)
    runner.sampler.apply_logits_processor(slot, None, [])


def decode_role(runner, request, slot):
    inputs = runner.share_inputs
    inputs["seq_lens_encoder"][slot], runner.exist_prefill_flag = 0, False
    if runner._cached_launch_token_num != -1:
        runner._cached_launch_token_num += 1 + (DRAFTS if runner.speculative_decoding else 0)
        runner._cached_real_bsz += 1
    if runner.speculative_decoding:
        inputs["draft_tokens"][slot, :2] = request.draft_token_ids[:2]
        inputs["seq_lens_this_time_buffer"][slot] = 2


def sampling(inputs, request, slot):
    inputs["eos_token_id"][:, 0] = request.eos_token_ids
    for name, asked, default in (
        ("top_p", "top_p", 0.7),
        ("top_k", "top_k", 0),
        ("min_p", "min_p", 0.0),
        ("temperature", "temperature", 0.95),
        ("penalty_score", "repetition_penalty", 1.0),
        ("frequency_score", "frequency_penalty", 0.0),
        ("presence_score", "presence_penalty", 0.0),
        ("temp_scaled_logprobs", "temp_scaled_logprobs", False),
        ("top_p_normalized_logprobs", "top_p_normalized_logprobs", False),
        ("generated_modality", "generated_modality", 0),
        ("min_dec_len", "min_tokens", 1),
        ("max_dec_len", "max_tokens", SIZES["L"]),
    ):
        inputs[name][slot] = request.get(asked, default)
    inputs["top_k_list"][slot], inputs["min_p_list"][slot] = request.get("top_k", 0), request.get("min_p", 0.0)
    if request.get("seed") is not None:
        inputs["infer_seed"][slot] = request.get("seed")
    words = request.get("bad_words_token_ids")
    inputs["bad_tokens_len"][slot] = len(words) if words else 1
    if words:
        inputs["bad_tokens"][slot, : len(words)] = words
    else:
        inputs["bad_tokens"][slot] = -1
    inputs["stop_seqs_len"][slot] = 0
    stops, lengths = request.get("stop_token_ids"), request.get("stop_seqs_len")
    if stops and lengths:
        inputs["stop_seqs_len"][slot, : len(lengths)] = lengths
        inputs["stop_seqs"][slot] = -1
        for at, stop in enumerate(stops):
            inputs["stop_seqs"][slot, at, : len(stop)] = stop
    inputs["logits_processors_args"][slot] = request.get("logits_processors_args") or {}


def propose(runner, requests, num_running):
    target, own = runner.share_inputs, runner.proposer.model_inputs
    own["num_running_requests"], own["running_requests_ids"] = num_running, range(num_running)
    own.index_to_batch_id = dict(target.index_to_batch_id)
    for request in requests:
        slot, kind = own.get_index_by_batch_id(request.idx), request.task_type.value
        if kind == PREFILL:
            start, end = request.prefill_start_index, request.prefill_end_index
            everything, length = request.prompt_token_ids + request.output_token_ids, end - start
            own["input_ids_len"][slot], own["pre_ids"][slot] = length - 1, -1
            own["input_ids"][slot, : length - 1] = everything[start + 1 : end]
            own["encoder_block_lens"][slot] = len(request.block_tables)
            table(own, slot, request.block_tables)
            own["stop_flags"][slot] = own["batch_drop"][slot] = False
            own["seq_lens_encoder"][slot] = own["seq_lens_this_time_buffer"][slot] = length
            own["seq_lens_decoder"][slot] = start
            own["step_idx"][slot] = len(request.output_token_ids) if end >= len(everything) else 0
            if runner.scheduler_config.splitwise_role == "decode":
                own["seq_lens_encoder"][slot], own["seq_lens_this_time_buffer"][slot] = 0, length + 1
                own["recompute_token_num"][slot], own["mask_rollback"][slot] = 0, 1
        elif kind == DECODE:
            own["encoder_block_lens"][slot] = len(request.block_tables)
            table(own, slot, request.block_tables)
        else:
            leave(own, slot)
    own["seq_lens_this_time"] = own["seq_lens_this_time_buffer"]
