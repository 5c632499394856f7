"""FastDeploy's save-output operations, with their argument lists, over hal's sink of System V messages.

Each call makes one message with an entry for each slot of the batch. Arguments are host arrays, or tensors on the host.
The operations' names and the order of arguments are FastDeploy's (develop @dad5a432a, 2026-05-19).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
from hal_core import InvalidValue, OutputRecord, Sink, SlotStatus

from .sysv.layouts import DRAFT, PREEMPTED, TARGET

Ints = np.ndarray[Any, np.dtype[np.int64]]
HostArray = Any
"""An array, or a tensor on the host."""


class Saved:
    """An output whose record is complete already (:class:`hal_core.frames.PendingOutput`).

    ``goes_on``: the sign of the first word, in FastDeploy the host flag ``not_need_stop``.
    """

    def __init__(self, record: OutputRecord, goes_on: bool, errors: deque[BaseException]) -> None:
        self.step, self.record, self.goes_on, self._errors = record.step, record, goes_on, errors
        self.request_ids = record.request_ids
        self.batch_ids, self.batch_size = range(len(record)), len(record)

    def ready(self) -> bool:
        """Return True: no copy is pending."""
        return True

    def resolve(self) -> OutputRecord:
        """Return the record."""
        return self.record

    def complete(self, error: BaseException | None) -> None:
        """Keep the sink's error for the next call; it may come after further outputs were put."""
        if error is not None:
            self._errors.append(error)


class SaveOutput:
    """The operations of one rank. ``open_sink``: layout to sink, called once for each layout in use.

    If an output does not fit its layout, the next call raises the error.
    """

    def __init__(self, open_sink: Callable[[str], Sink]) -> None:
        self._open, self._sinks = open_sink, dict[str, Sink]()
        self._errors = deque[BaseException]()
        self._steps = 0

    def save_output(
        self,
        sampled_token_ids: HostArray,
        not_need_stop: HostArray,
        last_preempted_idx: HostArray,
        mp_rank: int,
        save_each_rank: bool,
    ) -> None:
        """Save one token a slot; -1 for none."""
        if mp_rank == 0:
            self._put("plain", _sampled(sampled_token_ids, last_preempted_idx), not_need_stop)

    def save_output_topk(
        self,
        sampled_token_ids: HostArray,
        logprob_token_ids: HostArray,
        logprobs: HostArray,
        selected_token_ranks: HostArray,
        not_need_stop: HostArray,
        last_preempted_idx: HostArray,
        mp_rank: int,
    ) -> None:
        """Save one token a slot with log-probabilities, a row a slot."""
        if mp_rank == 0:
            values = _sampled(sampled_token_ids, last_preempted_idx)
            table = logprob_token_ids, logprobs, selected_token_ranks
            found = _logprobs(values["counts"], values["tokens"], np.arange(len(values["counts"])), *table)
            self._put("topk", values | found, not_need_stop)

    def speculate_save_output(
        self,
        accept_tokens: HostArray,
        accept_num: HostArray,
        not_need_stop: HostArray,
        seq_lens_decoder: HostArray,
        prompt_lens: HostArray,
        last_preempted_idx: HostArray,
        mp_rank: int,
        save_each_rank: bool,
        skip_prefill: bool,
    ) -> None:
        """Save the accepted tokens of each slot; with ``skip_prefill`` none of a slot in prefill."""
        if mp_rank == 0:
            tokens, counts = _table(accept_tokens), _ints(accept_num)
            if skip_prefill:
                counts = np.where(_in_prefill(seq_lens_decoder, prompt_lens, len(counts)), 0, counts)
            self._put("speculative", _rows(tokens[: len(counts)], counts, last_preempted_idx), not_need_stop)

    def speculate_save_output_topk(
        self,
        sampled_token_ids: HostArray,
        logprob_token_ids: HostArray,
        logprobs: HostArray,
        logprob_ranks: HostArray,
        accept_num: HostArray,
        cu_batch_token_offset: HostArray,
        not_need_stop: HostArray,
        seq_lens_decoder: HostArray,
        prompt_lens: HostArray,
        last_preempted_idx: HostArray,
        message_flag: int,
        mp_rank: int,
        save_each_rank: bool,
    ) -> None:
        """Save tokens with log-probabilities, whose rows begin at ``cu_batch_token_offset`` of each slot.

        ``message_flag``: 3 for the target's accepted tokens, 4 for the draft model's, a message without marks of
        preemption, which the target's has.

        :raises InvalidValue: for another message flag.
        """
        _check_flag(message_flag, TARGET, DRAFT)
        if mp_rank == 0:
            counts = _ints(accept_num)  # of the slots in the batch; other arguments may have a row for every slot
            counts = np.where(_in_prefill(seq_lens_decoder, prompt_lens, len(counts)), 0, counts)
            tokens = _table(sampled_token_ids)[: len(counts)]
            table = logprob_token_ids, logprobs, logprob_ranks
            if message_flag == TARGET:
                values = _rows(tokens, counts, last_preempted_idx)
                self._put_topk(values, cu_batch_token_offset, table, not_need_stop)
            else:
                left = _ints(last_preempted_idx)[: len(tokens)] != 0
                values = _rows(tokens[:, :0], np.zeros(len(tokens), np.int64), None)
                values |= _drafts(tokens, np.where(left, 0, counts[: len(tokens)]))
                self._put_topk(values, cu_batch_token_offset, table, not_need_stop, "draft_")

    def mtp_save_first_token(
        self,
        base_model_draft_tokens: HostArray,
        not_need_stop: HostArray,
        seq_lens_decoder: HostArray,
        prompt_lens: HostArray,
        step_idx: HostArray,
        mp_rank: int,
        save_each_rank: bool,
        skip_chunk_prefill: bool,
    ) -> None:
        """Save the first token of a prefill node and one draft, for slots whose prefill has just ended."""
        if mp_rank == 0 or save_each_rank:
            tokens = _table(base_model_draft_tokens)
            there = _ints(step_idx) == 1
            if skip_chunk_prefill:
                there &= ~_in_prefill(seq_lens_decoder, prompt_lens, len(there))
            self._put("speculative", _first(tokens, there, None), not_need_stop)

    def mtp_save_first_token_with_topk(
        self,
        base_model_draft_tokens: HostArray,
        logprob_token_ids: HostArray,
        logprobs: HostArray,
        logprob_ranks: HostArray,
        token_num_per_batch: HostArray,
        cu_batch_token_offset: HostArray,
        not_need_stop: HostArray,
        seq_lens_decoder: HostArray,
        prompt_lens: HostArray,
        last_preempted_idx: HostArray,
        message_flag: int,
        mp_rank: int,
        save_each_rank: bool,
    ) -> None:
        """Save these with log-probabilities of the first token; the draft has none (pull request 7442)."""
        _check_flag(message_flag, TARGET)
        if mp_rank == 0 or save_each_rank:
            there = _ints(token_num_per_batch) > 0
            there &= ~_in_prefill(seq_lens_decoder, prompt_lens, len(there))
            values = _first(_table(base_model_draft_tokens)[: len(there)], there, last_preempted_idx)
            table = logprob_token_ids, logprobs, logprob_ranks
            self._put_topk(values, cu_batch_token_offset, table, not_need_stop)

    def close(self, timeout: float) -> None:
        """Close all sinks within ``timeout`` seconds; see :class:`hal_core.Sink`."""
        end = time.monotonic() + timeout
        with ExitStack() as closing:
            closing.callback(self._raise_error)
            for sink in self._sinks.values():
                closing.callback(lambda one: one.close(max(0.0, end - time.monotonic())), sink)

    def _put_topk(
        self,
        values: dict[str, Any],
        starts: HostArray,
        table: tuple[HostArray, HostArray, HostArray],
        not_need_stop: HostArray,
        prefix: str = "",
    ) -> None:
        """Put a record with log-probabilities: of its tokens or, with the prefix ``draft_``, of its drafts."""
        found = _logprobs(values[f"{prefix}counts"], values["drafts" if prefix else "tokens"], _ints(starts), *table)
        more = {f"{prefix}{name}": array for name, array in found.items()}
        self._put("speculative-topk", values | more, not_need_stop)

    def _put(self, layout: str, values: dict[str, Any], not_need_stop: HostArray) -> None:
        self._raise_error()
        if layout not in self._sinks:
            self._sinks[layout] = self._open(layout)
        self._steps += 1
        goes_on = bool(np.asarray(not_need_stop).reshape(-1)[0])
        self._sinks[layout].put(Saved(OutputRecord(step=self._steps, **values), goes_on, self._errors))

    def _raise_error(self) -> None:
        if self._errors:
            raise self._errors.popleft()


def _check_flag(flag: int, *served: int) -> None:
    if flag not in served:
        cure = f"give {' or '.join(map(str, served))}: {TARGET} is the target's, {DRAFT} the draft model's"
        raise InvalidValue(f"message flag {flag}", cure=cure, argument="message_flag")


def _ints(values: HostArray) -> Ints:
    """The values as int64 ``[n]``."""
    return _array(values).reshape(-1).astype(np.int64)


def _table(values: HostArray, dtype: type[np.generic] = np.int64) -> np.ndarray[Any, Any]:
    """The values as ``[n, m]``."""
    array = _array(values)
    return array.reshape(len(array), prod(array.shape[1:])).astype(dtype)  # with no row, -1 would have no meaning


def _in_prefill(seq_lens_decoder: HostArray, prompt_lens: HostArray, n: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each of the batch's ``n`` slots whether its prefill goes on."""
    found: np.ndarray[Any, np.dtype[np.bool_]] = _ints(seq_lens_decoder)[:n] < _ints(prompt_lens)[:n]
    return found


def _array(values: HostArray) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
    return found


def _sampled(sampled: HostArray, preempted: HostArray) -> dict[str, Any]:
    """Return the fields of one token a slot. The sampler marks preempted slots too."""
    tokens = _ints(sampled)
    left = (_ints(preempted)[: len(tokens)] != 0) | (tokens == PREEMPTED)
    return _rows(tokens[:, None], (tokens >= 0).astype(np.int64), left)


def _rows(tokens: Ints, counts: Ints, preempted: HostArray) -> dict[str, Any]:
    """Return the fields of a record with ``counts`` tokens a slot; preempted slots have the status and no token."""
    n = len(tokens)
    left = np.zeros(n, np.bool_) if preempted is None else _ints(preempted)[:n] != 0
    counts = np.clip(np.where(left, 0, counts[:n]), 0, tokens.shape[1])
    status = np.where(left, SlotStatus.PREEMPTED, np.where(counts > 0, SlotStatus.TOKEN, SlotStatus.NONE))
    chosen = np.arange(tokens.shape[1]) < counts[:, None]
    return {
        "request_ids": tuple(f"slot {slot}" for slot in range(n)),
        "status": status.astype(np.uint8),
        "finish": np.zeros(n, np.uint8),
        "positions": np.zeros(n, np.int64),
        "counts": counts.astype(np.int32),
        "tokens": tokens[chosen],
        "first_token": np.zeros(n, np.bool_),
    }


def _first(tokens: Ints, there: np.ndarray[Any, np.dtype[np.bool_]], preempted: HostArray) -> dict[str, Any]:
    """Return the fields of first tokens, each followed by one draft."""
    values = _rows(tokens[:, :1], there.astype(np.int64), preempted)
    return values | _drafts(tokens[:, 1:2], values["counts"]) | {"first_token": values["counts"] > 0}


def _drafts(tokens: Ints, counts: Ints) -> dict[str, Any]:
    """Return the fields of ``counts`` drafts a slot."""
    counts = np.clip(counts, 0, tokens.shape[1]).astype(np.int32)
    return {"draft_counts": counts, "drafts": tokens[np.arange(tokens.shape[1]) < counts[:, None]]}


def _logprobs(
    counts: Ints, tokens: Ints, starts: Ints, ids: HostArray, scores: HostArray, ranks: HostArray
) -> dict[str, Any]:
    """Return log-probabilities of ``counts`` tokens a slot: the rows from ``starts`` of the slot on.

    Column 0 has the token itself, as in upstream's messages. Upstream replaces a request's last token at its limit, or
    after another end token, and leaves the one that was drawn in ``ids``; its score and rank stay.
    """
    counts = counts.astype(np.int64)
    first = np.repeat(starts[: len(counts)], counts)
    rows = first + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.ascontiguousarray(_table(ids)[rows])
    chosen[:, 0] = tokens
    return {
        "logprob_token_ids": chosen,
        "logprobs": np.ascontiguousarray(_table(scores, np.float32)[rows]),
        "ranks": _ints(ranks)[rows].astype(np.int32),
    }
