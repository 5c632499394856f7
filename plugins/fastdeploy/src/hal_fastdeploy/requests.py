"""Requests of FastDeploy's scheduler, read by their attributes and checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .batches import Places
from .values import integers, scalars

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
#: Attributes that only upstream's own function serves.
OTHERS = ("guided_json", "guided_regex", "guided_grammar", "structural_tag", "enable_thinking", "pooling_params")


@dataclass(slots=True)
class Task:
    """One request of a call: its slot and, for a prefill, its tokens and the piece that the next step runs."""

    request: Any
    kind: int
    slot: int
    tokens: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    prompt: int = 0
    start: int = 0
    length: int = 0
    blocks: np.ndarray[Any, np.dtype[np.int32]] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def piece(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens that the next step runs."""
        return self.tokens[self.start : self.start + self.length]

    @property
    def ends_prefill(self) -> bool:
        """Whether the piece is the last one."""
        return self.start + self.length >= len(self.tokens)

    @property
    def step(self) -> int:
        """``step_idx``: the number of generated tokens, 0 before the last piece."""
        return len(self.tokens) - self.prompt if self.ends_prefill else 0


def is_served(request: Any) -> str:  # noqa: ANN401 (upstream's)
    """Return "" for a request that an insertion serves, else the reason why upstream's own function has to."""
    if request.task_type.value == EXTEND:
        return f"{request.request_id!r} is an EXTEND task"
    if request.task_type.value == PREFILL:
        found = [name for name in OTHERS if getattr(request, name, None) is not None]
        if getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None:
            found.append("prompt_logprobs")
        if found:
            return f"{request.request_id!r} has {found[0]}"
    return ""


def read_task(request: Any, slot: int, target: Places, drafts: int) -> Task:  # noqa: ANN401
    """Check a request for its slot. ``drafts``: the draft tokens that a prefill must bring at least.

    :raises ValueError: for a request that cannot be inserted.
    """
    sizes, kind = target.sizes, int(request.task_type.value)
    if not 0 <= slot < sizes["n"]:
        raise ValueError(f"slot {slot} of {sizes['n']}")
    if kind not in (PREFILL, DECODE):
        return Task(request, kind, slot)
    if len(request.block_tables) > sizes["B"]:
        raise ValueError(f"{len(request.block_tables)} blocks, the table holds {sizes['B']}")
    blocks = integers(request.block_tables, np.int32, "block_tables")
    if kind == DECODE:
        return Task(request, kind, slot, blocks=blocks)
    prompt, output = request.prompt_token_ids, request.output_token_ids
    tokens = integers(prompt, np.int64, "prompt_token_ids")
    if len(output):
        tokens = np.concatenate([tokens, integers(output, np.int64, "output_token_ids")])
    start, end = int(request.prefill_start_index), int(request.prefill_end_index)
    if not 0 <= start < end <= len(tokens) <= sizes["L"] or end - start > sizes["C"]:
        raise ValueError(f"tokens {start} to {end} of {len(tokens)}; rows hold {sizes['L']}, a piece {sizes['C']}")
    _check_lists(request, sizes, drafts)
    return Task(request, kind, slot, tokens, len(prompt), start, end - start, blocks)


def check_values(task: Task, target: Places) -> Task:
    """Check each number of a prefill separately: a column's error does not name the request.

    :raises ValueError: for a number that its tensor cannot hold.
    """
    request = task.request
    if task.kind == PREFILL:
        for tensor, name, default in SAMPLING:
            given = request.get(name, target.sizes["L"] if default is None else default)
            if tensor in target:
                scalars([given], target[tensor].dtype, name)
        if (seed := request.get("seed")) is not None:
            scalars([seed], target["infer_seed"].dtype, "seed")
        for name in ("eos_token_ids", "draft_token_ids"):
            integers(getattr(request, name, None) or (), np.int64, name)
        integers(request.get("bad_words_token_ids") or (), np.int64, "bad_words_token_ids")
        if stops_of(request):
            for stop in request.get("stop_token_ids"):
                integers(stop, np.int64, "stop_token_ids")
            integers(request.get("stop_seqs_len"), np.int32, "stop_seqs_len")
    return task


def stops_of(request: Any) -> Sequence[Sequence[int]]:  # noqa: ANN401
    """Return a request's stop sequences; none without their lengths."""
    stops: Sequence[Sequence[int]] = request.get("stop_token_ids")
    return stops if stops and request.get("stop_seqs_len") else ()


def _check_lists(request: Any, sizes: dict[str, int], drafts: int) -> None:  # noqa: ANN401
    if len(request.eos_token_ids) != sizes["E"]:
        raise ValueError(f"{len(request.eos_token_ids)} eos_token_ids, the runner holds {sizes['E']}")
    if len(request.get("bad_words_token_ids") or ()) > sizes["V"]:
        raise ValueError(f"bad_words_token_ids are more than the vocabulary of {sizes['V']}")
    if stops := stops_of(request):
        lengths = request.get("stop_seqs_len")
        if len(stops) > sizes["Q"] or max(map(len, stops)) > sizes["q"]:
            raise ValueError(f"stop_token_ids do not fit {sizes['Q']} sequences of {sizes['q']} tokens")
        if len(lengths) != len(stops):
            raise ValueError(f"stop_seqs_len has {len(lengths)} lengths for {len(stops)} sequences: padded already?")
    if len(getattr(request, "draft_token_ids", None) or ()) < drafts:
        raise ValueError("the decode role needs the first token and one draft in draft_token_ids")
