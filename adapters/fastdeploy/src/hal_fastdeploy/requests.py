"""Requests of FastDeploy's scheduler, read by their attributes and checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .batches import Places
from .values import INT32, INT64, integers, scalars

PREFILL, DECODE, PREEMPTED, EXTEND, ABORT = range(5)
#: Tensor, name of the request's value, and its default if the request lacks the attribute.
SAMPLING: tuple[tuple[str, str, Any], ...] = (
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
    ("max_dec_len", "max_tokens", None),  # None: the row's length
)
LIMITS = {"max_think_lens": "reasoning_max_tokens", "max_reply_lens": "response_max_tokens"}
"""Tensor of a limit of thinking to the name of the request's value."""
#: Attributes that only upstream's own function serves.
OTHERS = ("guided_json", "guided_regex", "guided_grammar", "structural_tag", "pooling_params")


@dataclass(slots=True)
class Task:
    """One request of a call: its slot and, for a prefill, its tokens' number and the piece that the next step runs."""

    request: Any
    kind: int
    slot: int
    total: int = 0
    prompt: int = 0
    start: int = 0
    length: int = 0
    step: int = 0  # step_idx: the number of generated tokens, 0 before the last piece
    ends_prefill: bool = False
    bad_words: Sequence[int] = ()
    stops: Sequence[Sequence[int]] = ()


def is_served(request: Any) -> str:  # noqa: ANN401 (upstream's)
    """Return "" for a request that an insertion serves, else the reason why upstream's own function has to."""
    kind = getattr(getattr(request, "task_type", None), "value", None)  # without one it is refused, with its name
    if kind == EXTEND:
        return f"{request.request_id!r} is an EXTEND task"
    if kind not in (PREFILL, DECODE, PREEMPTED, ABORT, None):
        return f"{request.request_id!r} has the task type {kind!r}"
    if kind == PREFILL:
        for name in OTHERS:
            if getattr(request, name, None) is not None:
                return f"{request.request_id!r} has {name}"
    return ""


def thinking_of(request: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Return a request's thinking limits by tensor, -1 for none; None if it does not say whether it thinks.

    FastDeploy's processors say it for every request with messages.
    """
    if (thinks := request.get("enable_thinking")) is None:
        return None
    given = {tensor: request.get(name) if thinks else None for tensor, name in LIMITS.items()}
    limits = {tensor: -1 if limit is None else limit for tensor, limit in given.items()}
    return {"enable_thinking": bool(thinks), **limits, "limit_think_status": 0}


def read_task(request: Any, slot: int, target: Places, drafts: int) -> Task:  # noqa: ANN401
    """Check a request for its slot. ``drafts``: the draft tokens that a prefill must bring at least.

    :raises ValueError: for a request that cannot be inserted.
    """
    sizes, kind = target.sizes, int(request.task_type.value)
    if not 0 <= slot < sizes["n"]:
        raise ValueError(f"slot {slot} of {sizes['n']}")
    if kind not in (PREFILL, DECODE):
        return Task(request, kind, slot)
    if (count := _count(request.block_tables, "block_tables")) > sizes["B"]:
        raise ValueError(f"block_tables has {count} blocks, the table holds {sizes['B']}")
    if kind == DECODE:
        return Task(request, kind, slot)
    prompt = _count(request.prompt_token_ids, "prompt_token_ids")
    total = prompt + _count(request.output_token_ids, "output_token_ids")
    start, end = int(request.prefill_start_index), int(request.prefill_end_index)
    if not 0 <= start < end <= total <= sizes["L"] or end - start > sizes["C"]:
        what = f"prefill_start_index and prefill_end_index are {start} and {end}, of {total} tokens"
        raise ValueError(f"{what}; a row holds {sizes['L']}, a piece {sizes['C']}")
    stops = request.get("stop_token_ids") or ()
    if stops and not request.get("stop_seqs_len"):  # upstream writes no stop sequences without their lengths
        stops = ()
    words = request.get("bad_words_token_ids") or ()
    step = total - prompt if end == total else 0
    task = Task(request, kind, slot, total, prompt, start, end - start, step, end == total, words, stops)
    _check_lists(task, sizes, drafts)
    return task


def check_values(task: Task, target: Places) -> None:
    """Check each number of a task separately: a column's error does not name the request.

    :raises ValueError: for a number that its tensor cannot hold.
    """
    request = task.request
    if task.kind in (PREFILL, DECODE):
        integers(request.block_tables, INT32, "block_tables")
    if task.kind == PREFILL:
        for tensor, name, default in SAMPLING:
            given = request.get(name, target.sizes["L"] if default is None else default)
            if tensor in target:
                scalars([given], target[tensor].dtype, name)
        for tensor, value in (thinking_of(request) or {}).items():
            if tensor in target:
                scalars([value], target[tensor].dtype, LIMITS.get(tensor, tensor))
        if (seed := request.get("seed")) is not None:
            scalars([seed], target["infer_seed"].dtype, "seed")
        for name in ("prompt_token_ids", "output_token_ids", "eos_token_ids", "draft_token_ids"):
            if (given := getattr(request, name, None)) is not None:
                integers(given, INT64, name)
        integers(task.bad_words, INT64, "bad_words_token_ids")
        for stop in task.stops:
            integers(stop, INT64, "stop_token_ids")
        if task.stops:
            integers(request.get("stop_seqs_len"), INT32, "stop_seqs_len")


def _check_lists(task: Task, sizes: dict[str, int], drafts: int) -> None:
    request = task.request
    if (count := _count(request.eos_token_ids, "eos_token_ids")) != sizes["E"]:
        raise ValueError(f"{count} eos_token_ids, the runner holds {sizes['E']}")
    if _count(task.bad_words, "bad_words_token_ids") > sizes["V"]:
        raise ValueError(f"bad_words_token_ids are more than the vocabulary of {sizes['V']}")
    if task.stops:
        lengths = _count(request.get("stop_seqs_len"), "stop_seqs_len")
        longest = max([_count(stop, "stop_token_ids: a sequence") for stop in task.stops])
        if len(task.stops) > sizes["Q"] or longest > sizes["q"]:
            raise ValueError(f"stop_token_ids do not fit {sizes['Q']} sequences of {sizes['q']} tokens")
        if lengths != len(task.stops):
            what = f"stop_seqs_len has {lengths} lengths for {len(task.stops)} sequences: padded already?"
            raise ValueError(f"{what} Insert a copy of the request")
    if drafts and len(getattr(request, "draft_token_ids", None) or ()) < drafts:
        raise ValueError("the decode role needs the first token and one draft in draft_token_ids")


def _count(given: Any, name: str) -> int:  # noqa: ANN401
    try:
        return len(given)
    except TypeError:
        raise ValueError(f"{name}: {type(given).__name__} is no list") from None
