"""``insert_tasks_v1`` of FastDeploy's model runners, as one plan over the tensors that the runners already have.

The whole batch is checked first. Then one ``device.write`` writes the target's tensors and, with MTP, the proposer's.
Host lists and attributes follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from hal_core import DONE, BoundDevice, ByteRange, InvalidBatch, SlotRuns, Stream, Ticket, Writes

from . import host
from .batches import DRAFTED, PROPOSER, THINKING, Places
from .columns import Prefills, Round
from .host import Call, Host, method_of
from .requests import PREFILL, SAMPLING, Task, check_values, is_served, read_task, thinking_of
from .runners import GpuRunner, XpuRunner
from .values import INT32, INT64, Ints, Ragged, integers

log = logging.getLogger("hal")
WRONG = (ValueError, TypeError, AttributeError, OverflowError)
"""What reading or converting a wrong request raises."""


class Insertion:
    """``insert_tasks_v1(req_dicts, num_running_requests)`` for one runner.

    ``upstream``: the runner's own function. A call with a request that is not served here goes there whole, and is
    logged: EXTEND, multimodal and pooling models, guided decoding, routing replay. ``kind``: whose fields and slots the
    runner has, the GPU's or the XPU's. ``found``, ``proposer_found``: the names in the source of the runner's and the
    proposer's function (:mod:`hal_fastdeploy.reading`), since some versions do more; None: all that the runner allows.
    """

    def __init__(
        self,
        device: BoundDevice,
        runner: Any,  # noqa: ANN401 (upstream's)
        upstream: Callable[..., object],
        stream: Stream | None = None,
        kind: type[GpuRunner] | type[XpuRunner] = GpuRunner,
        found: frozenset[str] | None = None,
        proposer_found: frozenset[str] | None = None,
    ) -> None:
        self.device, self.runner, self.upstream, self.kind = device, runner, upstream, kind(runner)
        self.stream = device.default_stream if stream is None else stream
        self.drafts = bool(runner.speculative_decoding)
        inputs, most = runner.share_inputs, int(runner.model_config.max_model_len)
        there = inputs if found is None else {name.removeprefix("share_inputs.") for name in found}
        optional = {name: shape for name, shape in kind.optional.items() if name in there}
        tensors = {**kind.tensors, **optional, **(DRAFTED if self.drafts else {})}
        self.target = Places(device, inputs, tensors, "share_inputs", most)
        self.hosts, self.proposer_hosts = _found_in(kind.hosts, found), _found_in(host.PROPOSER, proposer_found)
        self.proposer: Places | None = None
        if method_of(runner) == "mtp":
            self.proposer = Places(device, runner.proposer.model_inputs, PROPOSER, "model_inputs", most)
        self.decodes = runner.scheduler_config.splitwise_role == "decode"
        if not device.capabilities.several_memories:
            count = len(self.target.found) + (0 if self.proposer is None else len(self.proposer.found))
            what = "%s:%d has no several_memories: an insertion is a submission for each of %d tensors, not one for all"
            log.warning(what, device.name, device.device.index, count)
        self._forget()

    def _forget(self) -> None:
        """Start without knowledge of the slots, as after upstream's own function has written them.

        - ``_words``: for each slot, the end of the part of its ``bad_tokens`` row that may differ from -1. Only
          insertions write that tensor, but a reordering of slots moves its rows.
        - ``_map``: the map of slots after the last call; another map shows such a reordering.
        - ``_holders``: the request of each batch id.
        """
        self._words = self._unknown_words()
        self._map = dict(self.kind.slots)
        self._holders = dict[int, str]()

    def _unknown_words(self) -> Ints:
        return np.full(self.target.sizes["n"], self.target.sizes["V"], np.int64)

    def __call__(self, req_dicts: Sequence[Any], num_running_requests: int) -> Ticket:
        """Insert the requests. The ticket completes with the writes.

        :raises InvalidBatch: naming each wrong request; then no tensor, list or attribute has changed.
        """
        if why := self._not_served(req_dicts):
            return self._pass_on(req_dicts, num_running_requests, why)
        self._follow()
        slots = self.kind.slots
        kept, holders = dict(slots), dict(self._holders)
        words = self._words.copy() if kept == self._map else self._unknown_words()
        ticket = None
        try:
            tasks = self._tasks(req_dicts, holders)
            if self._proposer_agrees(tasks):
                writes = self._planned(tasks, words)
                calls = self._calls(req_dicts, tasks, num_running_requests)
                for call in calls:
                    call.act(first=True)
                self._words = self._unknown_words()  # a write that raises may have written some of them
                ticket = self.device.write(writes=writes, stream=self.stream)
        finally:
            if ticket is None:  # nothing was inserted, so no batch id has a slot by it
                slots.clear()
                slots.update(kept)
        if ticket is None:
            return self._pass_on(req_dicts, num_running_requests, "the proposer has another slot for a batch id")
        self._words, self._map, self._holders = words, dict(slots), holders
        for call in calls:
            call.act()
        return ticket

    def _pass_on(self, requests: Sequence[Any], num_running_requests: int, why: str) -> Ticket:
        log.info("insert_tasks_v1 is upstream's own for this call: %s", why)
        try:
            self.upstream(requests, num_running_requests)
        finally:  # it may have written slots before it raised
            self._forget()
        return DONE

    def _proposer_agrees(self, tasks: Sequence[Task]) -> bool:
        """Return whether an MTP proposer finds the tasks' slots. It looks batch ids up when the runner is done. After a
        reordering a new one may have taken the slot of another one of the call."""
        if self.proposer is None:
            return True
        mapped = self.kind.slots or getattr(self.runner.proposer.model_inputs, "index_to_batch_id", {})
        found = {batch_id: slot for slot, batch_id in reversed(mapped.items())}
        return all(
            found[task.request.idx] == task.slot if task.request.idx in found else task.slot not in mapped
            for task in tasks
        )

    def _follow(self) -> None:
        """Resolve tensors that were replaced since the last call; what was known of the slots is of those before."""
        if changed := self.target.follow(self.runner.share_inputs):
            self._forget()  # also if a tensor of the proposer is refused below
        if self.proposer is not None:
            changed += self.proposer.follow(self.runner.proposer.model_inputs)
        if changed:
            log.info("insert_tasks_v1 follows tensors that were replaced: %s", ", ".join(changed))

    def _calls(self, requests: Sequence[Any], tasks: Sequence[Task], num_running_requests: int) -> list[Call]:
        """Return the call as the host data of the runner, and of an MTP proposer, needs it."""
        runner, restarts = self.runner, self.kind.restarts(tasks, self._read)
        rest = (requests, tasks, num_running_requests, self.decodes, dict(self.kind.slots), restarts)
        calls = [Call(self.hosts, runner, runner.share_inputs, *rest)]
        if self.proposer is not None:
            calls.append(Call(self.proposer_hosts, runner.proposer, runner.proposer.model_inputs, *rest))
        return calls

    def _not_served(self, requests: Sequence[Any]) -> str:
        for name in ("enable_mm", "is_pooling_model", "routing_replay_manager"):
            if getattr(self.runner, name, None):
                return name
        if self.proposer is not None and getattr(self.runner.proposer, "use_attn_mask_offset", False):
            return "use_attn_mask_offset"
        return next(filter(None, map(is_served, requests)), "")

    def _task(self, request: Any, find: Callable[[int], int], holders: dict[int, str]) -> Task:  # noqa: ANN401
        drafts = 0
        if request.task_type.value == PREFILL:
            holders[request.idx] = request.request_id
            if self.decodes and self.drafts:
                drafts = self.kind.drafts_of(int(request.prefill_end_index) - int(request.prefill_start_index))
        elif (holder := holders.setdefault(request.idx, request.request_id)) != request.request_id:
            raise ValueError(f"the slot of batch id {request.idx} holds {holder!r}")
        return read_task(request, find(request.idx), self.target, drafts)

    def _tasks(self, requests: Sequence[Any], holders: dict[int, str]) -> list[Task]:
        """Read and check the requests. Raises :class:`InvalidBatch` naming every wrong one."""
        tasks, found, find = list[Task](), dict[int, Exception](), self.kind.finder()
        for at, request in enumerate(requests):
            try:
                tasks.append(self._task(request, find, holders))
            except WRONG as error:
                found[at] = error
        if found:
            self._refuse(requests, tasks, found)
        return tasks

    def _planned(self, tasks: Sequence[Task], words: Ints) -> Writes:
        """Return all writes of the call. Raises :class:`InvalidBatch` for a number that its tensor cannot hold."""
        writes = Writes()
        try:
            for round_ in map(Round.of, _rounds(tasks)):
                self._write_target(writes, round_, words)
                if self.proposer is not None:
                    self._write_proposer(writes, round_, self.proposer)
        except WRONG:
            self._refuse([task.request for task in tasks], tasks, {})  # a column's error names no request
            raise
        return writes

    def _refuse(self, requests: Sequence[Any], tasks: Sequence[Task], found: dict[int, Exception]) -> None:
        """Raise :class:`InvalidBatch` if ``found`` or the numbers of ``tasks``, the other requests, name a problem."""
        rest = [at for at in range(len(requests)) if at not in found]
        for at, task in zip(rest, tasks, strict=True):
            try:
                check_values(task, self.target)
            except WRONG as error:
                found[at] = error
        if found:
            names = {at: getattr(requests[at], "request_id", "?") for at in found}
            raise InvalidBatch([f"task {at} ({names[at]!r}): {found[at]}" for at in sorted(found)])

    def _read(self, name: str) -> np.ndarray[Any, Any]:
        """Copy a tensor of the target to the host, and wait for it."""
        view = self.target[name]
        part = ByteRange(view.offset, view.offset + view.size * view.dtype.itemsize)
        copied = self.device.copy_out(memory=view.memory, parts=[part], stream=self.stream)
        copied.wait()
        return copied.data[0].view(view.dtype.storage)

    # -- the target ---------------------------------------------------------------------------------------------------

    def _write_target(self, writes: Writes, round_: Round, words: Ints) -> None:
        target, new = self.target, round_.new
        self._write_common(writes, target, round_, self.kind.lengths)
        if new is None:
            return
        target.ragged(writes, "input_ids", new.slots, new.tokens.cut(new.starts, new.lengths))
        target.column(writes, "prompt_lens", new.slots, new.tokens.lengths)
        writes.fill(target["is_block_step"], new.slots, False)
        writes.fill(target["step_seq_lens_decoder"], new.slots, 0)
        fed = new.lengths
        if self.decodes and self.drafts:
            fed = np.array([self.kind.drafts_of(task.length) for task in new.tasks], np.int64)
            drafts = [task.request.draft_token_ids[:count] for task, count in zip(new.tasks, fed, strict=True)]
            target.ragged(writes, "draft_tokens", new.slots, Ragged.of(drafts, INT64, "draft_token_ids"))
        target.column(writes, self.kind.lengths, new.slots, fed)
        self.kind.write(writes, target, new)
        self._write_thinking(writes, new)
        self._write_sampling(writes, new)
        self._write_bad_words(writes, new, words)
        self._write_stops(writes, new)

    def _write_common(self, writes: Writes, places: Places, round_: Round, lengths: str) -> None:
        """Write the fields that the target and the proposer share."""
        new, left = round_.new, round_.left
        if len(round_.grown):  # block tables are replaced: ids from column 0 on, and -1 behind them
            places.ragged(writes, "block_tables", round_.grown, round_.blocks)
            writes.fill(places["block_tables"], round_.grown, -1, round_.blocks.lengths)
            places.column(writes, "encoder_block_lens", round_.grown, round_.blocks.lengths)
        if len(left):
            writes.fill(places["block_tables"], left, -1)
            writes.fill(places["stop_flags"], left, True)
            for name in (lengths, "seq_lens_decoder", "seq_lens_encoder"):
                writes.fill(places[name], left, 0)
            writes.fill(places["is_block_step"], left, False)
        if new is not None:
            writes.fill(places["stop_flags"], new.slots, False)
            places.column(writes, "seq_lens_decoder", new.slots, new.starts)
            places.column(writes, "step_idx", new.slots, new.steps)
            encoded = np.zeros_like(new.lengths) if self.decodes else new.lengths
            places.column(writes, "seq_lens_encoder", new.slots, encoded)

    def _write_thinking(self, writes: Writes, new: Prefills) -> None:
        """Write the limits of the requests that say whether they think; others keep their slot's."""
        limits = {task.slot: limit for task in new.tasks if (limit := thinking_of(task.request)) is not None}
        slots = SlotRuns([*limits])
        for name in THINKING if limits and "enable_thinking" in self.target else ():
            self.target.column(writes, name, slots, [limit[name] for limit in limits.values()])

    def _write_sampling(self, writes: Writes, new: Prefills) -> None:
        target = self.target
        requests = [task.request for task in new.tasks]
        ends = integers([*chain.from_iterable([one.eos_token_ids for one in requests])], INT64, "eos_token_ids")
        writes.set(target["eos_token_id"], ends[-target.sizes["E"] :])  # global: the last one's
        for tensor, name, default in SAMPLING:
            if tensor in target:
                given = target.sizes["L"] if default is None else default
                target.column(writes, tensor, new.slots, [request.get(name, given) for request in requests])
        seeds = {task.slot: seed for task in new.tasks if (seed := task.request.get("seed")) is not None}
        if seeds:
            target.column(writes, "infer_seed", SlotRuns([*seeds]), [*seeds.values()])

    def _write_bad_words(self, writes: Writes, new: Prefills, words: Ints) -> None:
        """Write each request's words; -1 for one without, as far as its row may differ."""
        target, slots = self.target, new.slots.numbers
        given = Ragged.of([task.bad_words for task in new.tasks], INT64, "bad_words_token_ids")
        target.column(writes, "bad_tokens_len", new.slots, np.maximum(given.lengths, 1))
        target.ragged(writes, "bad_tokens", new.slots, given)
        bare = slots[(given.lengths == 0) & (words[slots] > 0)]
        if len(bare):
            writes.fill(target["bad_tokens"], bare, -1, 0, words[bare])
        words[slots] = np.where(given.lengths, np.maximum(given.lengths, words[slots]), 0)

    def _write_stops(self, writes: Writes, new: Prefills) -> None:
        """Write lengths padded with 0 and, for requests with stop sequences, their tokens as a whole block."""
        target, sizes = self.target, self.target.sizes
        lengths = np.zeros((len(new.tasks), sizes["Q"]), np.int32)
        for row, task in zip(lengths, new.tasks, strict=True):
            if task.stops:
                row[: len(task.stops)] = integers(task.request.get("stop_seqs_len"), INT32, "stop_seqs_len")
                block = np.full((sizes["Q"], sizes["q"]), -1, np.int64)
                for at, stop in enumerate(task.stops):
                    block[at, : len(stop)] = integers(stop, INT64, "stop_token_ids")
                writes.set(target["stop_seqs"][task.slot], block)
        writes.rows(target["stop_seqs_len"], new.slots, lengths)

    # -- the proposer -------------------------------------------------------------------------------------------------

    def _write_proposer(self, writes: Writes, round_: Round, places: Places) -> None:
        new = round_.new
        self._write_common(writes, places, round_, "seq_lens_this_time_buffer")
        if new is None:
            return
        writes.fill(places["pre_ids"], new.slots, -1)
        places.ragged(writes, "input_ids", new.slots, new.tokens.cut(new.starts + 1, new.lengths - 1))
        writes.fill(places["batch_drop"], new.slots, False)
        places.column(writes, "seq_lens_this_time_buffer", new.slots, new.lengths + self.decodes)
        if self.decodes:
            writes.fill(places["recompute_token_num"], new.slots, 0)
            writes.fill(places["mask_rollback"], new.slots, 1)


def _found_in(hosts: Sequence[Host], found: frozenset[str] | None) -> Sequence[Host]:
    return [one for one in hosts if one.act is not None and (found is None or not found.isdisjoint(one.names))]


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
