"""Scheduler: assigns slots and KV blocks to requests, and plans each step.

Continuous batching: every step decodes all running requests, and feeds up to ``chunk`` prompt tokens of new ones beside
them (chunked prefill). Requests are served by priority, the lower first, then in the order of arrival: no request
overtakes the first one waiting. If blocks run out, the last running request in that order gives up all of its own,
waits again, and is computed again later (recomputation, as in Kwon et al. 2023, section 4.5). So the first one always
continues, and every request ends.

If steps verify drafts, a request feeds up to ``tokens_per_step`` tokens: its next one and the drafts. Free blocks are
assigned for drafts, as far as a step may get and its drafts reach behind that. No request is preempted for drafts,
because a worker drafts no further than the blocks that a request holds.

If steps overlap, one is in flight while the next is scheduled, and its tokens are unknown. Each request then holds
blocks for the most tokens that it can get. A request that ended with a token runs in one more step, without effect. A
request that its length ends, whatever the step in flight gives, does not: new requests have its slot and blocks in the
next step, which is ordered after it. A request that left a slot continues, or its end is reported, when the output of
its last step is available.

No device is needed here; :mod:`hal_engine.engine.engine` carries the decisions out.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from hal_core import (
    AdmittedRequest,
    FinishReason,
    HalError,
    InvalidValue,
    OutputRecord,
    PluginError,
    Request,
    StateConfig,
    StateLayout,
    Task,
    TaskKind,
    predict_launch_tokens,
)
from hal_core import admit as admit_for
from msgspec.structs import replace

from .due import DueChecks
from .generation import Finished, Generation, check_fits, tokens_to_keep
from .in_flight import InFlight
from .slot_pool import SlotPool

if TYPE_CHECKING:
    from hal_engine.options import EngineOptions

Admit = Callable[[Request], AdmittedRequest]
Admitted = AdmittedRequest | HalError | None
"""A request that was admitted before, or the error that refuses it; None: to be admitted."""
_RANK = attrgetter("rank")
SPARE = 3
"""Blocks that a growing request gets besides, while as many are free for each running request."""
Grown = dict[Generation, list[int]]
"""Blocks that decoding requests are given in a step."""


DEFAULT_CHUNK = 256
"""Most prompt tokens of a step, where neither the user nor the runner gives a number."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Options of an engine that limit its scheduler: those of these names in
    :class:`hal_engine.options.EngineOptions`, in one process and on ranks.

    - ``chunk``: most prompt tokens of a step, all requests together; None: :data:`DEFAULT_CHUNK`.
    - ``step_tokens``: most tokens of a step, decoding included, which is never held back; None: decoding comes on top.

    Raises :class:`InvalidValue`, naming the option, for what is no whole number of at least 1.
    """

    chunk: int | None = None
    step_tokens: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            given = getattr(self, one.name)
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                option = f"--{one.name.replace('_', '-')}"
                raise InvalidValue(f"{given!r}", cure="give a whole number of at least 1", argument=option)

    @classmethod
    def of(cls, options: EngineOptions) -> Limits:
        """Return those among an engine's options."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(cls)})

    def preferring(self, chunk: int | None) -> Limits:
        """Return them with what a runner prefers, unless the user gave a number; None: it prefers nothing."""
        return dataclasses.replace(self, chunk=chunk) if self.chunk is None else self

    def check(self, sizes: StateConfig) -> None:
        """Raise :class:`InvalidValue` unless ``step_tokens`` exceeds the tokens that all slots may decode, each its
        next token and its drafts: prompts might wait for ever."""
        decoding = sizes.num_slots * sizes.max_accept
        if self.step_tokens is not None and self.step_tokens <= decoding:
            raise InvalidValue(
                f"{self.step_tokens} tokens a step leave none to prompts beside {sizes.num_slots} requests that "
                f"decode {sizes.max_accept} each",
                cure=f"give at least {decoding + 1}, or fewer slots or drafts",
                argument="--step-tokens",
            )

    def prompt_tokens(self, launched: int) -> int:
        """Return the most prompt tokens of a step that launches so many tokens for decoding (requests times 1 and
        drafts, because the number of drafts is not known yet)."""
        most = DEFAULT_CHUNK if self.chunk is None else self.chunk
        return most if self.step_tokens is None else min(most, self.step_tokens - launched)


NO_LIMITS = Limits()


class Scheduler:
    """Requests, slots and blocks of one worker. Call ``schedule`` and ``update`` once each for a step, in order.

    The calls alternate; with ``overlap``, a step is scheduled before the one before it is updated.

    - ``running``: the requests in slots; ``waiting``: the waiting ones. Both are in the order of service
      (:attr:`Generation.rank`): the first one waiting enters first, the last one running is preempted first.
    - ``admit_all``: admits several by one call, or returns their errors; by default it leaves that to ``admit``.
    - ``admit``: the function that admits a request, such as ``Worker.admit``; by default it is checked against
      ``layout`` alone.
    - ``limits``: the user's limits.
    - ``tokens_per_step``: most tokens that a decoding request feeds, and is given, in one step.
    - ``launch_tokens``: most tokens of the step that was scheduled last, known before it runs: so many for each
      decoding request, and its pieces of prompts. A step with fewer drafts feeds less.
    - ``preemptions``, ``most_running``: counts for the user.
    """

    one_stream = True
    """True: slots and blocks are written on the stream of the steps alone, and are free when their request leaves.
    False if blocks are filled from elsewhere: both are free once the last step that reads them was taken, and growth
    must look a step ahead."""

    def __init__(
        self,
        layout: StateLayout,
        blocks: int,
        *,
        limits: Limits = NO_LIMITS,
        admit: Admit | None = None,
        admit_all: Callable[[Sequence[Request]], Sequence[Admitted]] | None = None,
        overlap: bool = False,
    ) -> None:
        self.layout, self.tokens_per_step = layout, layout.sizes.max_accept
        self.entry_tokens = 1  # for which blocks must be free, beyond the known tokens, when a request enters
        limits.check(layout.sizes)
        self.limits = limits
        self._admit: Admit = admit or partial(admit_for, layout=layout)
        self._admit_all = admit_all
        self.overlap = overlap
        self._holdings = SlotPool(layout.sizes.num_slots, blocks)
        self.pool, self._slots = self._holdings.pool, self._holdings.slots
        self.running: list[Generation] = []
        self.waiting: deque[Generation] = deque()
        self.preemptions = self.most_running = self.launch_tokens = 0
        self._live: dict[str, Generation] = {}
        self._arrivals = 0
        self._in_flight = InFlight(self.tokens_per_step)
        self._due = DueChecks(self.tokens_per_step)
        self._decoding: list[Generation] | None = None  # of ``running``; None: to be found again
        self._to_abort: list[Generation] = []
        self._preempted: list[Generation] = []  # whose last step is in flight
        # requests that have left, because their length ends them with a step in flight
        self._ending: list[Generation] = []

    @property
    def busy(self) -> bool:
        """True while a request has not ended."""
        return bool(self._live)

    def admit_all(self, requests: Sequence[Request]) -> Sequence[Admitted]:
        """Admit requests by one call, for :meth:`check`; None for each that is admitted there."""
        return [None] * len(requests) if self._admit_all is None else self._admit_all(requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises as :meth:`check`."""
        self.enqueue(self.check(request))

    def check(self, request: Request, admitted: Admitted = None) -> Generation:
        """Admit a request, unless it is ``admitted``. Raises :class:`InvalidValue`, with the cure, if it can never
        run, and the error in ``admitted``."""
        if isinstance(admitted, HalError):
            raise admitted
        admitted = admitted or self._admit(request)
        check_fits(admitted, self.layout.sizes, self.pool.size)
        before = admitted.tokens[admitted.prompt_len :].tolist() if admitted.generated else []
        return Generation(request, admitted, admitted.prompt_len, before)

    def enqueue(self, generation: Generation) -> None:
        """Queue a request that was checked; no other one of its name has not ended."""
        self._arrivals += 1
        generation.arrive(self._arrivals)
        self._live[generation.request_id] = generation
        self._wait(generation)

    def abort(self, request_id: str) -> Finished | None:
        """End a request: at once while it waits (then return its end), else with the next step. Return None for an
        unknown name."""
        generation = self._live.get(request_id)
        if generation is None or generation.aborted:
            return None
        if generation in self.waiting:
            self.waiting.remove(generation)
            del self._live[request_id]
            return generation.finished(FinishReason.ABORT, reported=False)
        generation.aborted = True
        if generation.slot >= 0:
            self._to_abort.append(generation)
        return None

    @property
    def unfinished(self) -> list[Generation]:
        """Return the requests that have not ended, running or waiting, in the order of their arrival."""
        return list(self._live.values())

    @property
    def taken(self) -> int:
        """Number of steps whose output was taken."""
        return self._holdings.taken

    @property
    def load(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    def has_room(self, request: Request) -> bool:
        """Return whether the request, added now, would find a slot and blocks for its next token with the next step."""
        wanted = [(len(request.prompt), len(request.output), request.params.max_tokens)]
        wanted += [(one.prompt_len, len(one.generated), one.request.params.max_tokens) for one in self.waiting]
        known = [(prompt + output, tokens_to_keep(prompt, most)) for prompt, output, most in wanted]
        needed = [self._blocks_for(min(tokens + self.entry_tokens, most)) for tokens, most in known]
        return len(self._slots) > len(self.waiting) and sum(needed) <= self.pool.free

    def withdraw(self) -> tuple[list[Request], list[Finished]]:
        """Withdraw all requests, after the loss of their worker. Return each in the form in which it continues
        elsewhere, the oldest first, and the ends of those that were to be aborted."""
        ended = [one.finished(FinishReason.ABORT, reported=False) for one in self._live.values() if one.aborted]
        going_on = [one for one in self._live.values() if not one.aborted]
        self._live.clear()
        self._to_abort, self._preempted, self._ending, self.running, self.waiting = [], [], [], [], deque()
        return [replace(one.request, output=tuple(one.generated)) for one in going_on], ended

    def schedule(self) -> list[Task]:
        """Return the tasks of the next step: releases, new blocks, further prompt chunks, insertions."""
        tasks = [self._leave(one, TaskKind.ABORTED) for one in self._to_abort if one.slot >= 0]
        self._to_abort.clear()
        before = self.preemptions
        short = self._short()
        grown = self._grow(tasks, short)
        if self._decoding is None:
            self._decoding = [one for one in self.running if one.prefilled >= one.goal]
        decoding = self._decoding
        launched = predict_launch_tokens(len(decoding), self.tokens_per_step)
        allowed = self.limits.prompt_tokens(launched)
        feeding = [one for one in self.running if one.prefilled < one.goal] if len(decoding) < len(self.running) else []
        left = self._continue_prefills(tasks, allowed, feeding)
        entered: list[Generation] = []
        if self.preemptions == before:
            left = self._enter(tasks, left, entered)
            if self.tokens_per_step > 1:
                self._look_ahead(decoding, grown)
        for generation, blocks in grown.items():
            tasks.append(self._more_blocks(generation, blocks))
        for generation in short:
            if generation.slot >= 0:
                self._due.again(generation, self._room(generation))
        self.launch_tokens = launched + allowed - left
        self.most_running = max(self.most_running, len(self.running))
        first = [one for one in (*feeding, *entered) if one.decoding]
        self._in_flight.launch(decoding, first)
        self._holdings.launched += 1
        self._hand_on()
        return tasks

    def update(self, record: OutputRecord) -> list[Finished]:
        """Take the output of the oldest step in flight. Return the requests that ended with it."""
        over = self._in_flight.take(record)
        self._holdings.took()
        ended = [self._end(one, reason, message) for one, reason, message in over]
        self._hand_on()
        if strange := [one.request_id for one in self._ending if not one.pending]:
            cure = "have every step give each request that decodes at least one token, or its error"
            raise PluginError(f"{strange} have not ended at their length: a step gave them no token", cure=cure)
        return ended + self._go_back()

    # -- the parts of a step --------------------------------------------------------------------------------------

    def _grow(self, tasks: list[Task], short: list[Generation]) -> Grown:
        """Give each decoding request, in the order of service, the blocks that its next token needs; preempt for it if
        need be."""
        grown: Grown = {}
        for generation in short:
            if generation.slot < 0 or not generation.decoding:
                continue
            if (more := self._lacks(generation, generation.pending)) <= 0:
                continue
            while more > self.pool.free and generation.slot >= 0:
                self._preempt(self.running[-1], tasks)
            if generation.slot >= 0:
                if self.pool.free - more >= SPARE * len(self.running):
                    more += min(SPARE, self._lacks(generation, self.layout.sizes.max_model_len) - more)
                grown[generation] = self.pool.allocate(more)
        if self._ahead:
            self._grow_ahead(tasks, grown, [one for one in short if one.slot >= 0])
        return grown

    @property
    def _ahead(self) -> bool:
        """Return whether blocks that leave with a step come too late for the next one."""
        return self.overlap and not self.one_stream

    def _short(self) -> list[Generation]:
        """Return the requests, in the order of service, that may lack blocks for the next step, or the one after it."""
        short = []
        for one in self._due.next_step():
            if (room := self._room(one)) < 0:
                short.append(one)
            else:
                self._due.again(one, room)
        return short

    def _room(self, one: Generation) -> int:
        """Return how many tokens a request may get before it needs a block, besides those of the steps in flight."""
        ahead = self.tokens_per_step if self._ahead else 0
        room = len(one.blocks) * self.layout.sizes.block_size
        return room - one.prompt_len - len(one.generated) - one.pending - ahead

    def _grow_ahead(self, tasks: list[Task], grown: Grown, short: list[Generation]) -> None:
        """Ensure blocks for the step after this one: assign them now, or know that enough return by then. Preempt if
        need be now, because blocks released now are not free sooner."""
        lacking: dict[Generation, int] = {}
        for generation in short:
            if generation.decoding:
                after = self._lacks(generation, generation.pending + self.tokens_per_step)
                more = after - len(grown.get(generation, ()))
                if (now := min(more, self.pool.free)) > 0:
                    grown.setdefault(generation, []).extend(self.pool.allocate(now))
                if more > max(now, 0):
                    lacking[generation] = more - now
        while sum(lacking.values()) > self._holdings.returning + self.pool.free:
            last = self.running[-1]
            lacking.pop(last, None)
            self.pool.release(grown.pop(last, []))  # not in any step yet
            self._preempt(last, tasks)

    def _look_ahead(self, decoding: list[Generation], grown: Grown) -> None:
        """Give decoding requests, in that order, the blocks that the drafts after this step may need, if they are free:
        the step gives ``tokens_per_step`` tokens at most, and then as many drafts, less one, are fed behind them."""
        for generation in decoding:
            ahead = generation.pending + 2 * self.tokens_per_step - 1
            more = min(self._lacks(generation, ahead) - len(grown.get(generation, ())), self.pool.free)
            if more > 0:
                grown.setdefault(generation, []).extend(self.pool.allocate(more))

    def _more_blocks(self, generation: Generation, blocks: list[int]) -> Task:
        have = len(generation.blocks)
        generation.blocks += blocks
        return Task(TaskKind.MORE_BLOCKS, generation.slot, generation.admitted, blocks=blocks, first_block=have)

    def _preempt(self, generation: Generation, tasks: list[Task]) -> None:
        tasks.append(self._leave(generation, TaskKind.PREEMPTED))
        self.preemptions += 1
        self._preempted.append(generation)
        if not self._in_flight.steps:
            self._go_back()

    def _go_back(self) -> list[Finished]:
        """Queue preempted requests again once all their steps were taken; those that are to be aborted end instead."""
        ended: list[Finished] = []
        for generation in [one for one in self._preempted if not one.pending]:
            self._preempted.remove(generation)
            if generation.aborted:
                del self._live[generation.request_id]
                ended.append(generation.finished(FinishReason.ABORT, reported=False))
                continue
            generation.admitted = self._admit(replace(generation.request, output=tuple(generation.generated)))
            self._wait(generation)
        return ended

    def _continue_prefills(self, tasks: list[Task], left: int, feeding: list[Generation]) -> int:
        """Feed further chunks, in the order of service, into blocks that are assigned already. Return the rest of the
        budget."""
        for generation in feeding:
            length = min(left, generation.goal - generation.prefilled)
            if length > 0:
                start, have = generation.prefilled, len(generation.blocks)
                tasks.append(
                    Task(TaskKind.PREFILL_CHUNK, generation.slot, generation.admitted, start, length, first_block=have)
                )
                generation.prefilled += length
                self._decoding = None
                left -= length
        return left

    def _wait(self, generation: Generation) -> None:
        self.waiting.insert(bisect(self.waiting, generation.rank, key=_RANK), generation)

    def _enter(self, tasks: list[Task], left: int, entered: list[Generation]) -> int:
        """Insert the first waiting requests while there are slots, blocks and budget. Add them to ``entered``. Return
        the rest of the budget."""
        while self.waiting and self._slots and left > 0:
            generation = self.waiting[0]
            needed = self._blocks_for(min(generation.known + self.entry_tokens, generation.limit))
            if needed > self.pool.free:
                break
            self.waiting.popleft()
            length = min(left, generation.known)
            wanted = self._blocks_for(min(generation.known + self.tokens_per_step, generation.limit))  # drafts included
            blocks = self.pool.allocate(max(needed, min(wanted, self.pool.free)))
            generation.enter(self._slots.pop(), blocks, length)
            self._run(generation)
            entered.append(generation)
            tasks.append(
                Task(TaskKind.PREFILL, generation.slot, generation.admitted, 0, length, blocks=generation.blocks)
            )
            left -= length
        return left

    def _leave(self, generation: Generation, kind: TaskKind) -> Task:
        task = Task(kind, generation.slot, generation.admitted)
        self._vacate(generation, reported=True)
        return task

    def _run(self, generation: Generation) -> None:
        """Put the request into its slot from the step on that is being scheduled."""
        insort(self.running, generation, key=_RANK)
        self._decoding = None
        self._due.enter(generation)
        self._in_flight.enter(generation)

    def _hand_on(self) -> None:
        """Release requests that their length ends with the one step in flight, even if it gives only one token."""
        if self.overlap and self.one_stream and len(self._in_flight.steps) == 1:
            last = [one for one in self.running if one.pending]
            for one in [one for one in last if len(one.generated) + 1 >= one.request.params.max_tokens]:
                self._vacate(one)
                self._ending.append(one)

    def _remove(self, generation: Generation) -> None:
        self.running.remove(generation)
        self._decoding = None

    def _vacate(self, generation: Generation, *, reported: bool = False, failed: bool = False) -> None:
        """Release a request's slot and blocks. ``reported``: with the step that is being scheduled, which reports it.
        ``failed``: it may continue in a step in flight, until the host has stopped it."""
        self._remove(generation)
        self._in_flight.leave(generation, reported=reported)
        self._holdings.give_back(generation.slot, generation.blocks, at_once=self.one_stream and not failed)
        generation.slot, generation.blocks, generation.prefilled = -1, [], 0

    def _end(self, generation: Generation, reason: int, message: str) -> Finished:
        """Book a request's end from a record, whether it is in its slot or has just left it."""
        if generation.slot >= 0:
            self._vacate(generation, failed=reason == FinishReason.ERROR)
        for left in (self._preempted, self._ending):
            if generation in left:
                left.remove(generation)
        del self._live[generation.request_id]
        return generation.finished(FinishReason(reason), message)

    def _lacks(self, generation: Generation, tokens: int) -> int:
        """Return how many more blocks a request needs after so many more tokens."""
        return self._blocks_for(generation.furthest(tokens)) - len(generation.blocks)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.layout.sizes.block_size)
