"""``insert_tasks_v1`` of FastDeploy's model runners, written to their own tensors as one plan.

The target's tensors and, with MTP, the proposer's are written where they are: nothing is written before the whole batch
was checked, and then all of it is one ``device.write``. Host lists and attributes follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hal_core import DONE, BoundDevice, InvalidBatch, Stream, Ticket, Writes

from .batches import DRAFTED, PROPOSER, TARGET, Places
from .values import integers, scalars

log = logging.getLogger("hal")
PREFILL, DECODE, PREEMPTED, EXTEND, ABORT = range(5)
#: Tensor, name of the request's value, and its default where the request has no such attribute.
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
#: What upstream's own function has to do, by the request's attribute.
OTHERS = ("guided_json", "guided_regex", "guided_grammar", "structural_tag", "enable_thinking", "pooling_params")


@dataclass(slots=True)
class Task:
    """One request of a call: its slot and, of a prefill, all its tokens and the piece that the next step feeds."""

    request: Any
    kind: int
    slot: int
    tokens: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    prompt: int = 0
    start: int = 0
    length: int = 0
    blocks: np.ndarray[Any, np.dtype[np.int32]] = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def generated(self) -> int:
        """Tokens of its output."""
        return len(self.tokens) - self.prompt

    @property
    def ends_prefill(self) -> bool:
        """Whether the piece is the last one."""
        return self.start + self.length >= len(self.tokens)


class Insertion:
    """``insert_tasks_v1(req_dicts, num_running_requests)`` for one runner.

    ``upstream``: the runner's own function. Calls with what is not served here go there as a whole, and are logged:
    EXTEND, multimodal and pooling models, guided decoding, thinking limits, prompt log-probabilities, routing replay.
    """

    def __init__(
        self,
        device: BoundDevice,
        runner: Any,  # noqa: ANN401 (upstream's)
        upstream: Callable[..., object],
        stream: Stream | None = None,
    ) -> None:
        self.device, self.runner, self.upstream = device, runner, upstream
        self.stream = device.default_stream if stream is None else stream
        self.drafts = bool(runner.speculative_decoding)
        self.target = Places(
            device, runner.share_inputs, {**TARGET, **(DRAFTED if self.drafts else {})}, "share_inputs"
        )
        method = str(getattr(runner.spec_method, "value", runner.spec_method) or "").lower()
        self.suffix, self.proposer = method == "suffix", None
        if method == "mtp":
            self.proposer = Places(device, runner.proposer.model_inputs, PROPOSER, "model_inputs")
        self.decodes = runner.scheduler_config.splitwise_role == "decode"
        self._words = self._no_words_known()

    def _no_words_known(self) -> list[int]:
        """Of each slot, up to where its row of ``bad_tokens`` may not be -1: nobody but insertions writes there."""
        return [self.target.sizes["V"]] * self.target.sizes["n"]

    def __call__(self, req_dicts: Sequence[Any], num_running_requests: int) -> Ticket:
        """Insert the requests; the ticket of what is written.

        :raises InvalidBatch: naming each request that cannot be, with nothing changed.
        """
        if why := self._not_served(req_dicts):
            log.info("insert_tasks_v1 is upstream's own for this call: %s", why)
            self._words = self._no_words_known()
            self.upstream(req_dicts, num_running_requests)
            return DONE
        self.target.check()
        if self.proposer is not None:
            self.proposer.check()
        slots = self.runner.share_inputs.index_to_batch_id
        kept, words = dict(slots), [*self._words]
        try:
            tasks = self._checked(req_dicts, self._task)
            try:
                writes = self._planned(tasks, words)
            except (ValueError, TypeError, OverflowError):
                self._checked(tasks, self._check_values)  # says which request it was
                raise
        except BaseException:
            slots.clear()
            slots.update(kept)
            raise
        ticket = self.device.write(writes=writes, stream=self.stream)
        self._words = words
        self._book(tasks, num_running_requests)
        return ticket

    def _checked(self, given: Sequence[Any], check: Callable[[Any], Task]) -> list[Task]:
        """Check each of the requests or tasks. Raises :class:`InvalidBatch` naming all that cannot be."""
        tasks, found = [], list[str]()
        for at, one in enumerate(given):
            try:
                tasks.append(check(one))
            except (ValueError, TypeError, AttributeError, OverflowError) as error:
                name = getattr(one.request if isinstance(one, Task) else one, "request_id", "?")
                found.append(f"task {at} ({name!r}): {error}")
        if found:
            raise InvalidBatch(found)
        return tasks

    def _planned(self, tasks: Sequence[Task], words: list[int]) -> Writes:
        """Everything that the call writes to tensors."""
        writes = Writes()
        for round_ in _rounds(tasks):
            self._write_target(writes, round_, words)
            if self.proposer is not None:
                self._write_proposer(writes, round_, self.proposer)
        return writes

    # -- what comes in ------------------------------------------------------------------------------------------------

    def _not_served(self, requests: Sequence[Any]) -> str:
        runner = self.runner
        for name in ("enable_mm", "is_pooling_model", "routing_replay_manager"):
            if getattr(runner, name, None):
                return name
        for request in requests:
            if request.task_type.value == EXTEND:
                return f"{request.request_id!r} is an EXTEND task"
            if request.task_type.value == PREFILL:
                found = [name for name in OTHERS if getattr(request, name, None) is not None]
                if getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None:
                    found.append("prompt_logprobs")
                if found:
                    return f"{request.request_id!r} has {found[0]}"
        return ""

    def _task(self, request: Any) -> Task:  # noqa: ANN401 (upstream's Request, or a task of fewer attributes)
        """Check a request. Raises ValueError for what cannot be inserted."""
        sizes, kind = self.target.sizes, int(request.task_type.value)
        slot = int(self.runner.share_inputs.get_index_by_batch_id(request.idx))
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
            raise ValueError(
                f"tokens {start} to {end} of {len(tokens)}; rows hold {sizes['L']}, of one piece {sizes['C']}"
            )
        self._check_lists(request)
        return Task(request, kind, slot, tokens, len(prompt), start, end - start, blocks)

    def _check_values(self, task: Task) -> Task:
        """Check each number of a prefill by itself, to name the request whose number a column cannot hold."""
        request, sizes = task.request, self.target.sizes
        if task.kind == PREFILL:
            for tensor, name, default in SAMPLING:
                given = request.get(name, sizes["L"] if default is None else default)
                scalars([given], self.target[tensor].dtype, name)
            if (seed := request.get("seed")) is not None:
                scalars([seed], self.target["infer_seed"].dtype, "seed")
            np.array([*request.eos_token_ids, *(request.get("bad_words_token_ids") or ())], np.int64)
        return task

    def _check_lists(self, request: Any) -> None:  # noqa: ANN401
        sizes = self.target.sizes
        if len(request.eos_token_ids) != sizes["E"]:
            raise ValueError(f"{len(request.eos_token_ids)} eos_token_ids, the runner holds {sizes['E']}")
        if len(request.get("bad_words_token_ids") or ()) > sizes["V"]:
            raise ValueError(f"bad_words_token_ids are more than the vocabulary of {sizes['V']}")
        lengths, stops = request.get("stop_seqs_len"), request.get("stop_token_ids")
        if lengths and stops and (len(stops) > sizes["Q"] or max(map(len, stops)) > sizes["q"]):
            raise ValueError(f"stop_token_ids do not fit {sizes['Q']} sequences of {sizes['q']} tokens")
        if lengths and stops and len(lengths) != len(stops):
            raise ValueError(f"stop_seqs_len has {len(lengths)} lengths for {len(stops)} sequences: padded already?")
        if self.decodes and self.drafts and len(request.draft_token_ids or ()) < 2:
            raise ValueError("the decode role needs the first token and one draft in draft_token_ids")

    # -- the target ---------------------------------------------------------------------------------------------------

    def _write_target(self, writes: Writes, tasks: Sequence[Task], words: list[int]) -> None:
        new = [task for task in tasks if task.kind == PREFILL]
        grown = [task for task in tasks if task.kind == DECODE]
        left = [task.slot for task in tasks if task.kind not in (PREFILL, DECODE)]
        target = self.target
        _write_blocks(writes, target, [*new, *grown], left)
        _write_left(writes, target, left)
        if not new:
            return
        slots = [task.slot for task in new]
        prompts = [task.tokens[: task.prompt] for task in new]
        writes.ragged(target["token_ids_all"], slots, prompts)
        _fill_behind(writes, target["token_ids_all"], slots, [*map(len, prompts)], -1)
        pieces = [task.tokens[task.start : task.start + task.length] for task in new]
        writes.ragged(target["input_ids"], slots, pieces)
        lengths = [task.length for task in new]
        steps = [task.generated if task.ends_prefill else 0 for task in new]
        fed = [2] * len(new) if self.decodes and self.drafts else lengths
        for name, values in (
            ("seq_lens_decoder", [task.start for task in new]),
            ("seq_lens_this_time_buffer", fed),
            ("seq_lens_encoder", [0] * len(new) if self.decodes else lengths),
            ("prompt_lens", [len(task.tokens) for task in new]),
            ("step_idx", steps),
        ):
            _column(writes, target, name, slots, values)
        for name, value in (("stop_flags", False), ("is_block_step", False), ("step_seq_lens_decoder", 0)):
            writes.fill(target[name], slots, value)
        if self.decodes and self.drafts:
            writes.rows(
                target["draft_tokens"], slots, np.array([task.request.draft_token_ids[:2] for task in new], np.int64)
            )
        self._write_sampling(writes, new, slots, words)

    def _write_sampling(self, writes: Writes, new: Sequence[Task], slots: Sequence[int], words: list[int]) -> None:
        target, sizes = self.target, self.target.sizes
        requests = [task.request for task in new]
        writes.set(target["eos_token_id"], np.array(requests[-1].eos_token_ids, np.int64))  # global: the last one's
        for tensor, name, default in SAMPLING:
            given = sizes["L"] if default is None else default
            _column(writes, target, tensor, slots, [request.get(name, given) for request in requests])
        seeded = [task for task in new if task.request.get("seed") is not None]
        if seeded:
            seeds = [task.request.get("seed") for task in seeded]
            _column(writes, target, "infer_seed", [task.slot for task in seeded], seeds)
        rows = [np.array(request.get("bad_words_token_ids") or [], np.int64) for request in requests]
        _column(writes, target, "bad_tokens_len", slots, [len(row) or 1 for row in rows])
        writes.ragged(target["bad_tokens"], slots, rows)
        for slot, row in zip(slots, rows, strict=True):
            if not len(row) and words[slot]:
                writes.fill(target["bad_tokens"], [slot], -1, end=words[slot])
            words[slot] = max(len(row), words[slot]) if len(row) else 0
        self._write_stops(writes, new, slots)

    def _write_stops(self, writes: Writes, new: Sequence[Task], slots: Sequence[int]) -> None:
        """Lengths padded with 0 and, of requests that have some, the tokens as a whole block; in copies."""
        target, sizes = self.target, self.target.sizes
        lengths = np.zeros((len(new), sizes["Q"]), np.int32)
        for row, task in zip(lengths, new, strict=True):
            counts, stops = task.request.get("stop_seqs_len"), task.request.get("stop_token_ids")
            if counts and stops:
                row[: len(counts)] = counts
                block = np.full((sizes["Q"], sizes["q"]), -1, np.int64)
                for at, stop in enumerate(stops):
                    block[at, : len(stop)] = stop
                writes.set(target["stop_seqs"][task.slot], block)
        writes.rows(target["stop_seqs_len"], slots, lengths)

    # -- the proposer -------------------------------------------------------------------------------------------------

    def _write_proposer(self, writes: Writes, tasks: Sequence[Task], places: Places) -> None:
        new = [task for task in tasks if task.kind == PREFILL]
        left = [task.slot for task in tasks if task.kind not in (PREFILL, DECODE)]
        _write_blocks(writes, places, [task for task in tasks if task.kind in (PREFILL, DECODE)], left)
        _write_left(writes, places, left)
        if not new:
            return
        slots, lengths = [task.slot for task in new], [task.length for task in new]
        writes.fill(places["pre_ids"], slots, -1)
        pieces = [task.tokens[task.start + 1 : task.start + task.length] for task in new]
        writes.ragged(places["input_ids"], slots, pieces)
        writes.fill(places["stop_flags"], slots, False)
        writes.fill(places["batch_drop"], slots, False)
        _column(writes, places, "seq_lens_decoder", slots, [task.start for task in new])
        steps = [task.generated if task.ends_prefill else 0 for task in new]
        _column(writes, places, "step_idx", slots, steps)
        _column(writes, places, "seq_lens_encoder", slots, [0] * len(new) if self.decodes else lengths)
        fed = [length + 1 for length in lengths] if self.decodes else lengths
        _column(writes, places, "seq_lens_this_time_buffer", slots, fed)
        if self.decodes:
            writes.fill(places["recompute_token_num"], slots, 0)
            writes.fill(places["mask_rollback"], slots, 1)

    # -- the host -----------------------------------------------------------------------------------------------------

    def _book(self, tasks: Sequence[Task], num_running_requests: int) -> None:
        """Host lists and attributes, in the requests' order."""
        runner, inputs = self.runner, self.runner.share_inputs
        for task in tasks:
            request, slot = task.request, task.slot
            inputs["preempted_idx"][slot : slot + 1] = 0 if task.kind in (PREFILL, DECODE) else 1
            if task.kind == PREFILL:
                self._book_new(task)
            elif task.kind != DECODE:
                for name in ("prompt_logprobs_reqs", "in_progress_prompt_logprobs"):
                    getattr(runner, name).pop(request.request_id, None)
                runner.forward_batch_reqs_list[slot] = None
        inputs["seq_lens_this_time"] = inputs["seq_lens_this_time_buffer"][:num_running_requests]
        if self.proposer is not None:
            own = self.proposer.batch
            own["num_running_requests"] = num_running_requests
            own["running_requests_ids"] = range(num_running_requests)
            own.index_to_batch_id = dict(inputs.index_to_batch_id)
            own["seq_lens_this_time"] = own["seq_lens_this_time_buffer"]

    def _book_new(self, task: Task) -> None:
        runner, inputs = self.runner, self.runner.share_inputs
        request, slot = task.request, task.slot
        inputs["req_ids"][slot] = request.request_id
        inputs["is_chunk_step"][slot : slot + 1] = not task.ends_prefill
        inputs["top_k_list"][slot] = request.get("top_k", 0)
        inputs["min_p_list"][slot] = request.get("min_p", 0.0)
        inputs["logits_processors_args"][slot] = request.get("logits_processors_args") or {}
        runner.forward_batch_reqs_list[slot] = request
        runner.exist_prefill_flag = not self.decodes
        if self.decodes and runner._cached_launch_token_num != -1:
            drafts = int(runner.speculative_config.num_speculative_tokens) if self.drafts else 0
            runner._cached_launch_token_num += drafts + 1
            runner._cached_real_bsz += 1
        if self.suffix:
            runner.proposer.start_request(slot, request.request_id, [*map(int, request.prompt_token_ids)])
        if self.proposer is not None:
            self.proposer.batch["input_ids_len"][slot : slot + 1] = task.length - 1
        runner.sampler.apply_logits_processor(slot, None, [])


def _rounds(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """The tasks in order, cut before one whose slot has been written already: a later request's writes win."""
    round_: list[Task] = []
    taken: set[int] = set()
    for task in tasks:
        if task.slot in taken:
            yield round_
            round_, taken = [], set()
        round_.append(task)
        taken.add(task.slot)
    if round_:
        yield round_


def _write_blocks(writes: Writes, places: Places, tasks: Sequence[Task], left: Sequence[int]) -> None:
    """Tables replaced: the ids from column 0 on, -1 behind them; of slots that are left -1 alone."""
    slots = [task.slot for task in tasks]
    rows = [task.blocks for task in tasks]
    if tasks:
        writes.ragged(places["block_tables"], slots, rows)
        _column(writes, places, "encoder_block_lens", slots, [*map(len, rows)])
    _fill_behind(writes, places["block_tables"], [*slots, *left], [*map(len, rows), *[0] * len(left)], -1)


def _write_left(writes: Writes, places: Places, slots: Sequence[int]) -> None:
    """A slot whose request has left: stopped, with no tokens to feed; all else stays."""
    writes.fill(places["stop_flags"], slots, True)
    for name in ("seq_lens_this_time_buffer", "seq_lens_decoder", "seq_lens_encoder"):
        writes.fill(places[name], slots, 0)
    writes.fill(places["is_block_step"], slots, False)


def _fill_behind(writes: Writes, view: Any, slots: Sequence[int], begins: Sequence[int], value: int) -> None:  # noqa: ANN401
    """Fill each row from its own element on."""
    by_begin: dict[int, list[int]] = {}
    for slot, begin in zip(slots, begins, strict=True):
        by_begin.setdefault(begin, []).append(slot)
    for begin, some in by_begin.items():
        writes.fill(view, some, value, begin)


def _column(writes: Writes, places: Places, name: str, slots: Sequence[int], values: list[Any]) -> None:
    """One number for each slot, with upstream's conversions."""
    view = places[name]
    writes.rows(view, slots, scalars(values, view.dtype, name))
