"""The scheduler: which requests are in which slots with which KV blocks, and what the next step does.

Continuous batching: every step decodes all running requests, and feeds up to ``chunk`` tokens of the prompts of new
ones beside them (chunked prefill). First come, first served: nobody overtakes the first one waiting. When blocks
run out, the youngest running request gives up all of its own, waits at the front, and is computed again later
(recomputation, as in Kwon et al. 2023, section 4.5): so the oldest always goes on, and every request ends.

Where steps verify drafts, a request feeds up to ``tokens_per_step`` tokens, its next one and the drafts. Blocks that
are left over are given out for drafts, as far as a step may get and its drafts reach behind that; nobody is preempted
for them, as a worker drafts no further than the blocks that a request holds.

No device is needed here; :mod:`hal.engine.engine` carries the decisions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hal_core import (
    AdmittedRequest,
    FinishReason,
    InvalidValue,
    OutputRecord,
    Request,
    SlotStatus,
    StateLayout,
    Task,
    TaskKind,
    predict_launch_tokens,
)
from hal_core import admit as admit_for

from .blocks import BlockPool
from .generation import Finished, Generation, tokens_to_keep

Admit = Callable[[Request], AdmittedRequest]
Grown = dict[Generation, list[int]]
"""Blocks that decoding requests are given in a step."""
DEFAULT_CHUNK = 256
"""Prompt tokens that a step feeds at most, unless told otherwise."""


class Scheduler:
    """Requests, slots and blocks of one worker; ``schedule`` and ``update`` take turns, once each for a step.

    - ``running``: the requests in slots, oldest first; ``waiting``: the others, oldest first. Whoever waits is younger
      than whoever runs: requests enter in the order of their arrival, and the youngest leaves first.
    - ``admit``: what admits a request, such as ``Worker.admit``; by default it is checked against ``layout`` alone.
    - ``chunk``: most prompt tokens of a step, all requests together. Decoding comes on top and is never held back.
    - ``tokens_per_step``: most tokens that a decoding request feeds, and is given, in one step.
    - ``launch_tokens``: what the step that was scheduled last feeds at most, known before it runs: so many for each
      decoding request, and its pieces of prompts. A step feeds less where there were fewer drafts.
    - ``preemptions``, ``most_running``: counts for the user.
    """

    def __init__(
        self,
        layout: StateLayout,
        blocks: int,
        *,
        chunk: int = DEFAULT_CHUNK,
        admit: Admit | None = None,
    ) -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise InvalidValue(
                f"{chunk!r} prompt tokens a step", cure="give a whole number of at least 1", argument="chunk"
            )
        self.layout, self.chunk, self.tokens_per_step = layout, chunk, layout.sizes.max_accept
        self._admit: Admit = admit or partial(admit_for, layout=layout)
        self.pool = BlockPool(blocks)
        self.running: list[Generation] = []
        self.waiting: deque[Generation] = deque()
        self.preemptions = self.most_running = self.launch_tokens = 0
        self._live: dict[str, Generation] = {}
        self._to_abort: list[Generation] = []
        self._slots = list(range(layout.sizes.num_slots - 1, -1, -1))

    @property
    def busy(self) -> bool:
        """True while a request has not ended."""
        return bool(self._live)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. Raises as :meth:`check`."""
        admitted = self.check(request)
        generated = admitted.tokens[admitted.prompt_len :].tolist()
        self._live[request.request_id] = generation = Generation(request, admitted, admitted.prompt_len, generated)
        self.waiting.append(generation)

    def check(self, request: Request) -> AdmittedRequest:
        """The request, admitted. Raises :class:`InvalidValue`, with the cure, when it can never run."""
        who = f"request {request.request_id!r}"
        if request.request_id in self._live:
            raise InvalidValue("a request of that name has not ended yet", cure="choose another name", argument=who)
        admitted = self._admit(request)
        sizes, wanted = self.layout.sizes, admitted.prompt_len + request.params.max_tokens
        if wanted > sizes.max_model_len:
            raise InvalidValue(
                f"{admitted.prompt_len} prompt tokens and max_tokens = {request.params.max_tokens} are over the "
                f"length of {sizes.max_model_len}",
                cure=f"lower max_tokens to {sizes.max_model_len - admitted.prompt_len}, or shorten the prompt",
                argument=who,
            )
        needed = self._blocks_for(tokens_to_keep(admitted.prompt_len, request.params.max_tokens))
        if needed > self.pool.size:
            raise InvalidValue(
                f"needs up to {needed} KV blocks of {sizes.block_size} tokens, there are {self.pool.size}",
                cure="give more blocks, shorten the prompt, or lower max_tokens",
                argument=who,
            )
        return admitted

    def abort(self, request_id: str) -> Finished | None:
        """End a request: at once while it waits (then this returns its end), else with the next step. Unknown: None."""
        generation = self._live.get(request_id)
        if generation is None or generation in self._to_abort:
            return None
        if generation.slot < 0:
            self.waiting.remove(generation)
            del self._live[request_id]
            return generation.finished(FinishReason.ABORT, reported=False)
        self._to_abort.append(generation)
        return None

    @property
    def load(self) -> int:
        """How many requests have not ended."""
        return len(self._live)

    def has_room(self, request: Request) -> bool:
        """Whether the request, added now, would find a slot and blocks for its next token with the next step."""
        wanted = [(len(request.prompt), len(request.output), request.params.max_tokens)]
        wanted += [(one.prompt_len, len(one.generated), one.request.params.max_tokens) for one in self.waiting]
        needed = [
            self._blocks_for(min(prompt + output + 1, tokens_to_keep(prompt, most))) for prompt, output, most in wanted
        ]
        return len(self._slots) > len(self.waiting) and sum(needed) <= self.pool.free

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """Take all requests back, of a worker that is lost: each as it goes on elsewhere, the oldest first, and the
        ends of those that were to be aborted."""
        ended = [generation.finished(FinishReason.ABORT, reported=False) for generation in self._to_abort]
        going_on = [generation for generation in (*self.running, *self.waiting) if generation not in self._to_abort]
        self._live.clear()
        self._to_abort, self.running, self.waiting = [], [], deque()
        return [replace(one.request, output=tuple(one.generated)) for one in going_on], ended

    def schedule(self) -> list[Task]:
        """The tasks of the next step: who leaves, who needs a block, whose prompt goes on, who enters."""
        tasks = [self._leave(generation, TaskKind.ABORTED) for generation in self._to_abort]
        before = self.preemptions
        grown = self._grow(tasks)
        decoding = [generation for generation in self.running if generation.decoding]
        left = self._continue_prefills(tasks, self.chunk)
        if self.preemptions == before:
            left = self._enter(tasks, left)
            if self.tokens_per_step > 1:
                self._look_ahead(decoding, grown)
        for generation, blocks in grown.items():
            tasks.append(self._more_blocks(generation, blocks))
        self.launch_tokens = predict_launch_tokens(len(decoding), self.tokens_per_step) + self.chunk - left
        self.most_running = max(self.most_running, len(self.running))
        return tasks

    def update(self, record: OutputRecord) -> list[Finished]:
        """Take over a step's output; the requests that ended with it."""
        ended: list[Finished] = []
        tokens, at = record.tokens.tolist(), 0
        rows = zip(
            record.request_ids, record.status.tolist(), record.finish.tolist(), record.counts.tolist(), strict=True
        )
        for row, (request_id, status, finish, count) in enumerate(rows):
            if status == SlotStatus.PREEMPTED:
                continue
            generation = self._live[request_id]
            if count:
                generation.generated += tokens[at : at + count]
                at += count
            if finish != FinishReason.NONE:
                if status != SlotStatus.ABORTED:
                    self._vacate(generation)
                del self._live[request_id]
                ended.append(generation.finished(FinishReason(finish), record.messages.get(row, "")))
        self._to_abort = [generation for generation in self._to_abort if generation.slot >= 0]
        return ended

    # -- the parts of a step --------------------------------------------------------------------------------------

    def _grow(self, tasks: list[Task]) -> Grown:
        """Give each decoding request, oldest first, the block that its next token needs; preempt for it if need be."""
        grown: Grown = {}
        for generation in tuple(self.running):
            if generation.slot < 0 or not generation.decoding:
                continue
            if (more := self._blocks_for(generation.known) - len(generation.blocks)) <= 0:
                continue
            while more > self.pool.free and generation.slot >= 0:
                self._preempt(self.running[-1], tasks)
            if generation.slot >= 0:
                grown[generation] = self.pool.allocate(more)
        return grown

    def _look_ahead(self, decoding: list[Generation], grown: Grown) -> None:
        """Give decoding requests, oldest first, the blocks that the drafts after this step may need, if they are free:
        the step gives ``tokens_per_step`` tokens at most, and then as many drafts, less one, are fed behind them."""
        for generation in decoding:
            furthest = min(generation.known + 2 * self.tokens_per_step - 1, generation.limit)
            have = len(generation.blocks) + len(grown.get(generation, ()))
            more = min(self._blocks_for(furthest) - have, self.pool.free)
            if more > 0:
                grown.setdefault(generation, []).extend(self.pool.allocate(more))

    def _more_blocks(self, generation: Generation, blocks: list[int]) -> Task:
        have = len(generation.blocks)
        generation.blocks += blocks
        return Task(TaskKind.MORE_BLOCKS, generation.slot, generation.admitted, blocks=blocks, first_block=have)

    def _preempt(self, generation: Generation, tasks: list[Task]) -> None:
        tasks.append(self._leave(generation, TaskKind.PREEMPTED))
        resumed = replace(generation.request, output=tuple(generation.generated))
        generation.admitted = self._admit(resumed)
        self.waiting.appendleft(generation)
        self.preemptions += 1

    def _continue_prefills(self, tasks: list[Task], left: int) -> int:
        """Feed further chunks, oldest request first; what is left of the budget. Their blocks they have already."""
        for generation in self.running:
            length = min(left, generation.goal - generation.prefilled)
            if length > 0:
                start, have = generation.prefilled, len(generation.blocks)
                tasks.append(
                    Task(TaskKind.PREFILL_CHUNK, generation.slot, generation.admitted, start, length, first_block=have)
                )
                generation.prefilled += length
                left -= length
        return left

    def _enter(self, tasks: list[Task], left: int) -> int:
        """Let those in who come first, while there are slots, blocks and budget; what is left of the budget."""
        while self.waiting and self._slots and left > 0:
            generation = self.waiting[0]
            needed = self._blocks_for(min(generation.known + 1, generation.limit))
            if needed > self.pool.free:
                break
            self.waiting.popleft()
            length = min(left, generation.known)
            wanted = self._blocks_for(min(generation.known + self.tokens_per_step, generation.limit))  # drafts included
            blocks = self.pool.allocate(max(needed, min(wanted, self.pool.free)))
            generation.enter(self._slots.pop(), blocks, length)
            self.running.append(generation)
            tasks.append(
                Task(TaskKind.PREFILL, generation.slot, generation.admitted, 0, length, blocks=generation.blocks)
            )
            left -= length
        return left

    def _leave(self, generation: Generation, kind: TaskKind) -> Task:
        task = Task(kind, generation.slot, generation.admitted)
        self._vacate(generation)
        return task

    def _vacate(self, generation: Generation) -> None:
        """Free a request's slot and blocks."""
        self.running.remove(generation)
        self._slots.append(generation.slot)
        self.pool.release(generation.blocks)
        generation.slot, generation.blocks, generation.prefilled = -1, [], 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.layout.sizes.block_size)
