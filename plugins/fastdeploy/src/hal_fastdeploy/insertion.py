"""``insert_tasks_v1`` of FastDeploy's model runners, as one plan over the tensors that the runners already have.

The whole batch is checked first. Then one ``device.write`` writes the target's tensors and, with MTP, the proposer's.
Host lists and attributes follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from hal_core import DONE, BoundDevice, ByteRange, InvalidBatch, Stream, Ticket, Writes

from .batches import DRAFTED, PROPOSER, Places
from .requests import DECODE, PREFILL, SAMPLING, Task, check_values, is_served, read_task, stops_of
from .runners import GpuRunner, XpuRunner, method_of
from .values import integers

log = logging.getLogger("hal")


class Insertion:
    """``insert_tasks_v1(req_dicts, num_running_requests)`` for one runner.

    ``upstream``: the runner's own function. A call with a request that is not served here goes there whole, and is
    logged: EXTEND, multimodal and pooling models, guided decoding, thinking limits, prompt log-probabilities, routing
    replay. ``kind``: whose fields and slots the runner has, the GPU's or the XPU's.
    """

    def __init__(
        self,
        device: BoundDevice,
        runner: Any,  # noqa: ANN401 (upstream's)
        upstream: Callable[..., object],
        stream: Stream | None = None,
        kind: type[GpuRunner] | type[XpuRunner] = GpuRunner,
    ) -> None:
        self.device, self.runner, self.upstream, self.kind = device, runner, upstream, kind(runner)
        self.stream = device.default_stream if stream is None else stream
        self.drafts = bool(runner.speculative_decoding)
        tensors = {**kind.tensors, **(DRAFTED if self.drafts else {})}
        self.target = Places(device, runner.share_inputs, tensors, "share_inputs")
        self.proposer: Places | None = None
        if method_of(runner) == "mtp":
            self.proposer = Places(device, runner.proposer.model_inputs, PROPOSER, "model_inputs")
        self.decodes = runner.scheduler_config.splitwise_role == "decode"
        self._forget()

    def _forget(self) -> None:
        """Start without knowledge of the slots, as after upstream's own function has written them.

        - ``_words``: for each slot, the end of the part of its ``bad_tokens`` row that may differ from -1. Only
          insertions write that tensor, but a reordering of slots moves its rows.
        - ``_map``: the map of slots after the last call; another map shows such a reordering.
        - ``_holders``: the request of each batch id.
        """
        self._words = [self.target.sizes["V"]] * self.target.sizes["n"]
        self._map = dict(self.kind.slots)
        self._holders = dict[int, str]()

    def __call__(self, req_dicts: Sequence[Any], num_running_requests: int) -> Ticket:
        """Insert the requests. The ticket completes with the writes.

        :raises InvalidBatch: naming each wrong request; then no tensor, list or attribute has changed.
        """
        if why := self._not_served(req_dicts):
            log.info("insert_tasks_v1 is upstream's own for this call: %s", why)
            self.upstream(req_dicts, num_running_requests)
            self._forget()
            return DONE
        self.target.check()
        if self.proposer is not None:
            self.proposer.check()
        slots = self.kind.slots
        kept, holders = dict(slots), dict(self._holders)
        words = [*self._words] if kept == self._map else [self.target.sizes["V"]] * self.target.sizes["n"]
        try:
            tasks = self._checked(req_dicts, lambda request: self._task(request, holders))
            writes = self._planned(tasks, words)
            restarts = self.kind.restarts(tasks, self._read)
            ticket = self.device.write(writes=writes, stream=self.stream)
        except BaseException:
            slots.clear()
            slots.update(kept)
            raise
        self._words, self._map, self._holders = words, dict(slots), holders
        self._book(tasks, num_running_requests, restarts)
        return ticket

    def _not_served(self, requests: Sequence[Any]) -> str:
        for name in ("enable_mm", "is_pooling_model", "routing_replay_manager"):
            if getattr(self.runner, name, None):
                return name
        return next(filter(None, map(is_served, requests)), "")

    def _task(self, request: Any, holders: dict[int, str]) -> Task:  # noqa: ANN401
        drafts = 0
        if request.task_type.value == PREFILL:
            holders[request.idx] = request.request_id
            if self.decodes and self.drafts:
                drafts = self.kind.drafts_of(int(request.prefill_end_index) - int(request.prefill_start_index))
        elif (holder := holders.setdefault(request.idx, request.request_id)) != request.request_id:
            raise ValueError(f"the slot of batch id {request.idx} holds {holder!r}")
        return read_task(request, self.kind.slot_of(request.idx), self.target, drafts)

    def _checked(self, given: Sequence[Any], check: Callable[[Any], Task]) -> list[Task]:
        """Check each of the requests or tasks. Raises :class:`InvalidBatch` naming every wrong one."""
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
        """Return all writes of the call. Raises :class:`InvalidBatch` for a number that its tensor cannot hold."""
        writes = Writes()
        try:
            for round_ in _rounds(tasks):
                self._write_target(writes, round_, words)
                if self.proposer is not None:
                    self._write_proposer(writes, round_, self.proposer)
        except (ValueError, TypeError, OverflowError):
            self._checked(tasks, lambda task: check_values(task, self.target))  # names the request
            raise
        return writes

    def _read(self, name: str) -> np.ndarray[Any, Any]:
        """Copy a tensor of the target to the host, and wait for it."""
        view = self.target[name]
        part = ByteRange(view.offset, view.offset + view.size * view.dtype.itemsize)
        copied = self.device.copy_out(memory=view.memory, parts=[part], stream=self.stream)
        copied.wait()
        return copied.data[0].view(view.dtype.storage)

    # -- the target ---------------------------------------------------------------------------------------------------

    def _write_target(self, writes: Writes, tasks: Sequence[Task], words: list[int]) -> None:
        target = self.target
        new = self._write_common(writes, target, tasks, self.kind.lengths)
        if not new:
            return
        slots, lengths = [task.slot for task in new], [task.length for task in new]
        writes.ragged(target["input_ids"], slots, [task.piece for task in new])
        target.column(writes, "prompt_lens", slots, [len(task.tokens) for task in new])
        writes.fill(target["is_block_step"], slots, False)
        writes.fill(target["step_seq_lens_decoder"], slots, 0)
        fed = lengths
        if self.decodes and self.drafts:
            fed = [self.kind.drafts_of(length) for length in lengths]
            drafts = [
                np.array(task.request.draft_token_ids[:count], np.int64) for task, count in zip(new, fed, strict=True)
            ]
            writes.ragged(target["draft_tokens"], slots, drafts)
        target.column(writes, self.kind.lengths, slots, fed)
        self.kind.write(writes, target, new, slots)
        self._write_sampling(writes, new, slots, words)

    def _write_common(self, writes: Writes, places: Places, tasks: Sequence[Task], lengths: str) -> list[Task]:
        """Write the fields that the target and the proposer share, and return the prefills."""
        new = [task for task in tasks if task.kind == PREFILL]
        grown = [task for task in tasks if task.kind == DECODE]
        left = [task.slot for task in tasks if task.kind not in (PREFILL, DECODE)]
        _write_blocks(writes, places, [*new, *grown], left)
        writes.fill(places["stop_flags"], left, True)
        for name in (lengths, "seq_lens_decoder", "seq_lens_encoder"):
            writes.fill(places[name], left, 0)
        writes.fill(places["is_block_step"], left, False)
        if new:
            slots = [task.slot for task in new]
            writes.fill(places["stop_flags"], slots, False)
            places.column(writes, "seq_lens_decoder", slots, [task.start for task in new])
            places.column(writes, "step_idx", slots, [task.step for task in new])
            encoded = [0 if self.decodes else task.length for task in new]
            places.column(writes, "seq_lens_encoder", slots, encoded)
        return new

    def _write_sampling(self, writes: Writes, new: Sequence[Task], slots: Sequence[int], words: list[int]) -> None:
        target = self.target
        requests = [task.request for task in new]
        ends = [integers(request.eos_token_ids, np.int64, "eos_token_ids") for request in requests]
        writes.set(target["eos_token_id"], ends[-1])  # global: the last one's
        for tensor, name, default in SAMPLING:
            if tensor in target:
                given = target.sizes["L"] if default is None else default
                target.column(writes, tensor, slots, [request.get(name, given) for request in requests])
        seeds = {task.slot: seed for task in new if (seed := task.request.get("seed")) is not None}
        if seeds:
            target.column(writes, "infer_seed", [*seeds], [*seeds.values()])
        name = "bad_words_token_ids"
        rows = [integers(request.get(name) or (), np.int64, name) for request in requests]
        target.column(writes, "bad_tokens_len", slots, [len(row) or 1 for row in rows])
        writes.ragged(target["bad_tokens"], slots, rows)
        for slot, row in zip(slots, rows, strict=True):
            if not len(row) and words[slot]:
                writes.fill(target["bad_tokens"], [slot], -1, end=words[slot])
            words[slot] = max(len(row), words[slot]) if len(row) else 0
        self._write_stops(writes, new, slots)

    def _write_stops(self, writes: Writes, new: Sequence[Task], slots: Sequence[int]) -> None:
        """Write lengths padded with 0 and, for requests with stop sequences, their tokens as a whole block."""
        target, sizes = self.target, self.target.sizes
        lengths = np.zeros((len(new), sizes["Q"]), np.int32)
        for row, task in zip(lengths, new, strict=True):
            if stops := stops_of(task.request):
                row[: len(stops)] = integers(task.request.get("stop_seqs_len"), np.int32, "stop_seqs_len")
                block = np.full((sizes["Q"], sizes["q"]), -1, np.int64)
                for at, stop in enumerate(stops):
                    block[at, : len(stop)] = integers(stop, np.int64, "stop_token_ids")
                writes.set(target["stop_seqs"][task.slot], block)
        writes.rows(target["stop_seqs_len"], slots, lengths)

    # -- the proposer -------------------------------------------------------------------------------------------------

    def _write_proposer(self, writes: Writes, tasks: Sequence[Task], places: Places) -> None:
        new = self._write_common(writes, places, tasks, "seq_lens_this_time_buffer")
        if not new:
            return
        slots = [task.slot for task in new]
        writes.fill(places["pre_ids"], slots, -1)
        writes.ragged(places["input_ids"], slots, [task.piece[1:] for task in new])
        writes.fill(places["batch_drop"], slots, False)
        fed = [task.length + self.decodes for task in new]
        places.column(writes, "seq_lens_this_time_buffer", slots, fed)
        if self.decodes:
            writes.fill(places["recompute_token_num"], slots, 0)
            writes.fill(places["mask_rollback"], slots, 1)

    # -- the host -----------------------------------------------------------------------------------------------------

    def _book(self, tasks: Sequence[Task], num_running_requests: int, restarts: bool) -> None:
        """Write host lists and attributes, in the requests' order."""
        inputs = self.runner.share_inputs
        for task in tasks:
            slot = task.slot
            inputs["preempted_idx"][slot : slot + 1] = 0 if task.kind in (PREFILL, DECODE) else 1
            if task.kind == PREFILL:
                inputs["top_k_list"][slot] = task.request.get("top_k", 0)
                inputs["min_p_list"][slot] = task.request.get("min_p", 0.0)
                if self.proposer is not None:
                    self.proposer.batch["input_ids_len"][slot : slot + 1] = task.length - 1
        self.kind.book(tasks, num_running_requests, self.decodes, restarts)
        if self.proposer is not None:
            own = self.proposer.batch
            own["num_running_requests"] = num_running_requests
            own["running_requests_ids"] = range(num_running_requests)
            self.kind.book_proposer(own)
            own["seq_lens_this_time"] = own["seq_lens_this_time_buffer"]


def _rounds(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Cut the tasks before each whose slot the round has already: a later request's writes win."""
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
    """Replace block tables: the ids from column 0 on and -1 behind them; only -1 for slots of ``left``."""
    slots = [task.slot for task in tasks]
    rows = [task.blocks for task in tasks]
    if tasks:
        writes.ragged(places["block_tables"], slots, rows)
        places.column(writes, "encoder_block_lens", slots, [*map(len, rows)])
    begins = [*map(len, rows), *[0] * len(left)]
    places.fill_behind(writes, "block_tables", [*slots, *left], begins, -1)
