"""Stand-ins for FastDeploy's requests, batches of tensors and runners, and drawn requests.

For comparisons of runners, and for the tests. Written from FastDeploy's sources; the insertion uses none of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

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
enable_thinking bool n,1 1 | max_think_lens i32 n,1 -1 | max_reply_lens i32 n,1 -1 | limit_think_status i32 n,1 0
"""
GPU_ALONE = "seq_lens_this_time_buffer i32 n 0 | generated_modality i32 n -1"
XPU_ALONE = """
seq_lens_this_time i32 n 0 | first_token_ids i64 n,1 -1 | ori_seq_lens_encoder i32 n,1 0 | pre_ids i64 n,L -1
"""
CONFIGURED = {"max_model_len": "L", "eos_tokens_lens": "E", "max_stop_seqs_num": "Q", "stop_seqs_max_len": "q"}
DRAFTED = "draft_tokens i64 n,D 0"
TYPES: Mapping[str, type[np.generic]] = {"i64": np.int64, "i32": np.int32, "f32": np.float32, "bool": np.bool_}
Arrays = dict[str, np.ndarray[Any, Any]]


class Request:
    """An upstream request: attributes, and ``get`` with a default for a missing one."""

    def __init__(self, kind: int, idx: int, request_id: str, **values: Any) -> None:  # noqa: ANN401 (its attributes)
        self.task_type, self.idx, self.request_id = SimpleNamespace(value=kind), idx, request_id
        self.values: dict[str, Any] = values.pop("values", {})
        self.sampling_params = SimpleNamespace(prompt_logprobs=values.pop("prompt_logprobs", None))
        for name, value in values.items():
            setattr(self, name, value)

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401
        """A value of the request, or the default."""
        return self.values.get(name, default)


class Batch:
    """An InputBatch: tensors and host lists by name, with the map of batch ids."""

    def __init__(self, tensors: Mapping[str, Any], host: Mapping[str, Any]) -> None:
        self.data = {**tensors, **host}
        self.index_to_batch_id: dict[int, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401
        return self.data[name]

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        self.data[name] = value

    def get_index_by_batch_id(self, batch_id: int) -> int:
        """Return the slot of a batch id; a new id takes the slot of its number."""
        for index, known in self.index_to_batch_id.items():
            if known == batch_id:
                return index
        self.index_to_batch_id[batch_id] = batch_id
        return batch_id


def arrays(*tables: str) -> Arrays:
    """The tensors of some tables as NumPy arrays, by name, as they are at the start."""
    sizes = SIZES | {"D": DRAFTS + 1, "1": 1}
    lines = [line.split() for line in "|".join(tables).replace("\n", "|").split("|") if line.strip()]
    return {
        name: np.full([sizes[letter] for letter in letters.split(",")], float(value), TYPES[kind])
        for name, kind, letters, value in lines
    }


def used(arrays: Arrays) -> Arrays:
    """The arrays with a value that no insertion writes, as after steps of other requests."""
    for array in arrays.values():
        array[...] = 77
    return arrays


def target_arrays(method: str = "", kind: str = "gpu") -> Arrays:
    """The tensors of a runner's ``share_inputs``."""
    return arrays(INPUT_BATCH, GPU_ALONE if kind == "gpu" else XPU_ALONE, DRAFTED if method else "")


def host_of_target(kind: str = "gpu") -> dict[str, Any]:
    """The host lists and arrays of a runner's ``share_inputs``."""
    n = SIZES["n"]
    lists: dict[str, Any] = {name: [None] * n for name in ("top_k_list", "min_p_list", "top_p_list")}
    lists["preempted_idx"] = np.zeros((n, 1), np.int32)
    if kind == "xpu":
        return lists | {"not_need_stop": np.zeros(1, np.bool_)}
    lists |= {name: [None] * n for name in ("req_ids", "logits_processors_args")}
    return lists | {"is_chunk_step": np.zeros(n, np.bool_)}


def runner_of(
    tensors: Mapping[str, Any], *, method: str = "", role: str = "mixed", cached: int = -1, kind: str = "gpu"
) -> Any:  # noqa: ANN401 (a runner)
    """A runner as an insertion sees it. ``tensors``: of the target, by name."""
    calls: list[Any] = []
    runner = SimpleNamespace(
        share_inputs=Batch(tensors, host_of_target(kind)),
        speculative_decoding=bool(method),
        spec_method=method or None,
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
        scheduler_config=SimpleNamespace(splitwise_role=role),
        model_config=SimpleNamespace(**{name: SIZES[letter] for name, letter in CONFIGURED.items()}),
        sampler=SimpleNamespace(apply_logits_processor=recorded(calls, "sampler")),
        cache_controller=SimpleNamespace(submit_swap_tasks=recorded(calls, "swap")),
        deterministic_logger=None,
        enable_cache_manager_v1=False,
        pooling_params=None,
        prompt_logprobs_reqs={},
        in_progress_prompt_logprobs={},
        calls=calls,
    )
    if kind == "gpu":
        runner.exist_prefill_flag = None
        runner._cached_launch_token_num, runner._cached_real_bsz = cached, 2 if cached != -1 else -1
        runner.forward_batch_reqs_list = [None] * SIZES["n"]
    else:
        runner.initialize_kv_cache = lambda: runner.share_inputs.data.setdefault("caches", [])
    return runner


def recorded(calls: list[Any], name: str) -> Callable[..., None]:
    """A method that keeps its calls."""
    return lambda *given: calls.append((name, *given))


# Drawn requests ------------------------------------------------------------------------------------------------------

VALUES: Mapping[str, Sequence[Any]] = {
    "temperature": [0.0, 1, 1.5],
    "top_k": [5, 1.75],
    "top_p": [0.25, 1],
    "min_p": [0.5],
    "repetition_penalty": [1.25],
    "frequency_penalty": [-0.5],
    "presence_penalty": [2],
    "temp_scaled_logprobs": [True],
    "top_p_normalized_logprobs": [True],
    "generated_modality": [1],
    "min_tokens": [3],
    "max_tokens": [9],
    "seed": [0, 2**53 + 1, 2**63 - 1],
    "bad_words_token_ids": [[1, 2, 3], [4], []],
    "stop_token_ids": [[[1, 2], [3, 4]], [[5, 6, 7, 8]], [[1], [2], [3]]],
    "logits_processors_args": [{"a": 1}, None],
    "enable_thinking": [True, True, False, None],
    "reasoning_max_tokens": [4, None],
    "response_max_tokens": [6],
}
"""Parameters of a drawn request."""


def prefill(
    slot: int,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    piece: tuple[int, int] | None = None,
    blocks: Sequence[int] = (3, 4),
    **values: Any,  # noqa: ANN401 (its parameters)
) -> Request:
    """A PREFILL request of a whole prompt, or of a piece ``[start, end)``."""
    start, end = piece or (0, len(prompt) + len(output))
    return Request(
        PREFILL,
        slot,
        values.pop("name", f"r{slot}"),
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        prefill_start_index=start,
        prefill_end_index=end,
        block_tables=list(blocks),
        eos_token_ids=values.pop("eos", [2, 5]),
        draft_token_ids=values.pop("drafts", [30, 31]),
        prompt_logprobs=values.pop("prompt_logprobs", None),
        values=values,
    )


KINDS = (PREFILL, PREFILL, PREFILL, DECODE, PREEMPTED, ABORT)


def drawn(draw: random.Random, slot: int, role: str, names: dict[int, str], kinds: Sequence[int] = KINDS) -> Request:
    """A request of one of the kinds for a slot; ``names``: of the requests in the slots, by slot."""
    kind = draw.choice(kinds)
    if kind == PREFILL and draw.random() < 0.8:  # else another piece of the request that is there
        names.pop(slot, None)
    blocks = [draw.randrange(100) for _ in range(draw.randrange(1, 7))]
    if kind == DECODE:
        return Request(DECODE, slot, names.setdefault(slot, f"r{slot}"), block_tables=blocks)
    if kind != PREFILL:
        return Request(kind, slot, names.setdefault(slot, f"r{slot}"))
    prompt = [draw.randrange(16) for _ in range(draw.randrange(1, 16))]
    output = [draw.randrange(16) for _ in range(draw.choice([0, 0, 3]))]
    piece = None
    if role == "decode":
        output = [draw.randrange(16)]
        piece = (len(prompt), len(prompt) + 1)
    elif draw.random() < 0.5:  # a chunk, or a cached prefix
        total = len(prompt) + len(output)
        start = draw.randrange(total)
        piece = (start, draw.randrange(start + 1, total + 1))
    values = {name: draw.choice(choices) for name, choices in VALUES.items() if draw.random() < 0.5}
    if "stop_token_ids" in values:
        values["stop_seqs_len"] = [*map(len, values["stop_token_ids"])]
    if draw.random() < 0.2:
        values["prompt_logprobs"] = 1
    eos, name = [draw.randrange(9), 2], names.setdefault(slot, f"{slot}-{draw.randrange(99)}")
    return prefill(slot, prompt, output, piece, blocks, drafts=[7, 8, 9], eos=eos, name=name, **values)
