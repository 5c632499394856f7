"""The state changes of a step: positions, counters, stop flags, and the token that is fed next.

:func:`update_inputs` is the reference in NumPy, for every slot of a state at once. A device may run it on the state's
own memory (cpu), on a copy that is written back as one plan (the default of :class:`hal_core.devices.DeviceBase`), or
as a kernel; the effect is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .fields import FinishReason, SplitRole, StateConfig

Column = np.ndarray[Any, np.dtype[Any]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

READS = (
    "sampled_token_ids",
    "accept_tokens",
    "prompt_lens",
    "min_dec_len",
    "max_dec_len",
    "eos_num",
    "eos_token_ids",
    "stop_seqs_num",
    "stop_seqs_len",
    "stop_seqs",
    "split_role",
)
"""Fields that are only read."""

WRITES = (
    "accept_num",
    "step_idx",
    "stop_flags",
    "stop_reason",
    "seq_lens_decoder",
    "seq_lens_encoder",
    "seq_lens_this_time",
    "next_tokens",
    "draft_num",
)
"""Fields that are changed, besides ``token_ids``, to which accepted tokens are appended."""

STEP_FIELDS = (*READS, *WRITES, "token_ids")
"""All fields used by a step, in the order in which kernels get their places."""

_NO_SLOTS: Column = np.zeros(0, np.int64)


def update_inputs(fields: Mapping[str, Column], sizes: StateConfig, *, speculative: bool) -> None:
    """Advance every slot in place; ``fields`` maps each name to its array ``[slots, width]``.

    A slot runs when its ``stop_flags`` is false and ``seq_lens_this_time`` is not 0.

    - Prefilling (``seq_lens_encoder`` not 0): that many more tokens are in the KV cache now. Before the last token of
      the request is there, no token is accepted and the slot waits for its next chunk (``seq_lens_this_time`` 0).
    - Else the step's tokens are accepted: the sampled one, or, speculative, the first ``accept_num`` of
      ``accept_tokens``, cut after the first that ends the request. They are appended to ``token_ids``, counted in
      ``step_idx``, and the last of them is fed next.
    - A request ends (``stop_flags``, ``stop_reason``) with an end token or stop sequence once ``step_idx`` has reached
      ``min_dec_len``, at ``max_dec_len``, and when its row is full.
    - A slot whose ``split_role`` is PREFILL stops with its first token and drops the step's other tokens.
      ``stop_reason`` stays 0 unless the request ends with that token: otherwise it continues on another worker.
    - ``accept_num`` is the number of tokens the step gave the slot, 0 if it did not run (G22, G24). A value out of
      bounds is left unchanged, for ``save_output`` to report; the slot stops and no token is appended (G21).
    """
    column = {name: array[:, 0] for name, array in fields.items()}
    runs = ~column["stop_flags"] & (column["seq_lens_this_time"] > 0)
    encoder = np.where(runs, column["seq_lens_encoder"], 0)
    known = column["prompt_lens"] + column["step_idx"]
    gives, feeds = runs, encoder > 0
    if feeds.any():
        prefilled = column["seq_lens_decoder"] + encoder
        gives = runs & (~feeds | (prefilled >= known))
        column["seq_lens_decoder"][feeds] = prefilled[feeds]
    several = _NO_SLOTS
    if speculative:
        bad = gives & ((column["accept_num"] < 0) | (column["accept_num"] > sizes.max_accept))
        column["accept_num"][~gives] = 0
        gives = gives & ~bad
        column["stop_flags"][bad], column["stop_reason"][bad] = True, FinishReason.ERROR
        several = np.flatnonzero(gives & (column["accept_num"] > 1))
    else:
        column["accept_num"][...] = gives
    accepted = column["accept_num"]
    # A single token, the usual case even with drafts, is appended in all slots at once.
    single = np.flatnonzero(gives & (accepted == 1)) if speculative else np.flatnonzero(gives)
    for slot in several.tolist():
        _cut(fields, slot, sizes)
    decodes = gives & ~feeds
    column["seq_lens_decoder"][decodes] += accepted[decodes]
    _append_several(fields, column, several, known)
    if len(single):
        _append_single(fields, column, single, known, column["accept_tokens" if speculative else "sampled_token_ids"])
        _stop_single(fields, column, single, sizes)
    on = gives & ~column["stop_flags"]
    column["seq_lens_this_time"][...] = np.where(on, 1, np.where(runs, 0, column["seq_lens_this_time"]))
    column["seq_lens_encoder"][runs] = 0
    column["draft_num"][runs] = 0


def _append_single(
    fields: Mapping[str, Column], column: Mapping[str, Column], slots: Column, known: Column, given: Column
) -> None:
    """Append the one new token of each of ``slots`` to its row, count it, and feed it next."""
    tokens = given[slots]
    fields["token_ids"][slots, known[slots]] = tokens
    column["next_tokens"][slots] = tokens
    column["step_idx"][slots] += 1


def _append_several(fields: Mapping[str, Column], column: Mapping[str, Column], slots: Column, known: Column) -> None:
    """Append the accepted tokens, at least one each, to the token rows, count them, and feed the last one next."""
    for slot in slots.tolist():
        count, at = int(column["accept_num"][slot]), int(known[slot])
        fields["token_ids"][slot, at : at + count] = fields["accept_tokens"][slot, :count]
        column["next_tokens"][slot] = fields["accept_tokens"][slot, count - 1]
        column["step_idx"][slot] += count


def _stop_single(fields: Mapping[str, Column], column: Mapping[str, Column], slots: Column, sizes: StateConfig) -> None:
    """Find the requests that end with their one new token."""
    generated, token = column["step_idx"][slots], column["next_tokens"][slots]
    total = column["prompt_lens"][slots] + generated
    inside = np.arange(fields["eos_token_ids"].shape[1]) < column["eos_num"][slots][:, None]
    ends = ((fields["eos_token_ids"][slots] == token[:, None]) & inside).any(1)
    for at in np.flatnonzero(column["stop_seqs_num"][slots] > 0).tolist():
        ends[at] |= _ends_with_stop(fields, int(slots[at]), int(total[at]), int(generated[at]), sizes)
    stops = ends & (generated >= column["min_dec_len"][slots])
    full = (generated >= column["max_dec_len"][slots]) | (total >= sizes.max_model_len)
    over = stops | full
    column["stop_reason"][slots[over]] = np.where(stops[over], FinishReason.STOP, FinishReason.LENGTH)
    column["stop_flags"][slots] = over | (column["split_role"][slots] == SplitRole.PREFILL)


def _cut(fields: Mapping[str, Column], slot: int, sizes: StateConfig) -> None:
    """Cut the several accepted tokens of a slot after the first with which it stops, and mark the end."""
    row = {name: array[slot] for name, array in fields.items()}
    known = int(row["prompt_lens"][0] + row["step_idx"][0])
    tokens, handed_over = row["token_ids"], row["split_role"][0] == SplitRole.PREFILL
    for i in range(int(row["accept_num"][0])):
        token, generated, total = row["accept_tokens"][i], int(row["step_idx"][0]) + i + 1, known + i + 1
        tokens[total - 1] = token
        ends = bool((row["eos_token_ids"][: int(row["eos_num"][0])] == token).any())
        ends = ends or _ends_with_stop(fields, slot, total, generated, sizes)
        stops = ends and generated >= row["min_dec_len"][0]
        over = stops or generated >= row["max_dec_len"][0] or total >= sizes.max_model_len
        if over or handed_over:
            row["accept_num"][0] = i + 1
            row["stop_flags"][0] = True
            if over:
                row["stop_reason"][0] = FinishReason.STOP if stops else FinishReason.LENGTH
            return


def _ends_with_stop(fields: Mapping[str, Column], slot: int, total: int, generated: int, sizes: StateConfig) -> bool:
    """Return True if the generated tokens of a slot end with one of its stop sequences."""
    sequences = fields["stop_seqs"][slot].reshape(-1, sizes.max_stop_length)
    for i in range(int(fields["stop_seqs_num"][slot, 0])):
        length = int(fields["stop_seqs_len"][slot, i])
        if (
            0 < length <= generated
            and (fields["token_ids"][slot, total - length : total] == sequences[i, :length]).all()
        ):
            return True
    return False
