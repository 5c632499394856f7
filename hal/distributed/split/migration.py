"""Migration requests from prefill to decode workers: the front of an engine whose workers have two roles.

A prefill worker with room takes the first waiting request. A decode worker is then offered the request, and others in
turn until one has room. Blocks move from rank to rank, by the table of :mod:`hal.distributed.split.states`. The engine
calls this module with each message, and messages go out through the workers: no call waits.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hal_core import FinishReason, HalError, OutputRecord, Request, SplitRole
from hal_core.handover import check_facts

from hal.distributed.control_messages import Arrived, Over, Release, Reserve, Reserved, SendTo, SplitWord
from hal.distributed.worker import RankWorker
from hal.engine import Finished
from hal.engine.roles import DecodeScheduler, Key, Prefilled, PrefillScheduler
from hal.timeouts import TIMEOUTS

from .journey import Journey
from .states import AT_DECODE, AT_PREFILL, HELD, ON_OFFER, Event, State

if TYPE_CHECKING:
    Prefill = RankWorker[PrefillScheduler]
    Decode = RankWorker[DecodeScheduler]

MOST_FAILURES = 8
"""Offers of a request that decode workers may refuse before it ends with an error."""


@dataclass(frozen=True)
class Bounds:
    """Timeouts in seconds. ``move``: the answer to an offer, and the arrival of sealed blocks. ``hold``: from a
    request's first token to a decode worker with room; after it the request is computed again. ``alone``: a role
    without any worker, before requests end with an error."""

    move: float = field(default_factory=lambda: TIMEOUTS.offer)
    hold: float = field(default_factory=lambda: TIMEOUTS.hold)
    alone: float = field(default_factory=lambda: TIMEOUTS.alone)


class Migration:
    """All requests of an engine and their states. One thread uses it.

    - ``workers``: those of both roles. ``end``: books the end of a request, once.
    - ``check``: raises :class:`InvalidValue` for a request that can never run.
    - ``drafts`` False: drafts of a first token stay behind, as they must if their distribution counts.
    """

    def __init__(
        self,
        workers: Sequence[Prefill | Decode],
        end: Callable[[Finished], None],
        *,
        check: Callable[[Request], object],
        drafts: bool = True,
        bounds: Bounds | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._check, self._with_drafts = workers, check, drafts
        self.journeys: dict[str, Journey] = {}
        self.front: list[Journey] = []
        self._clock, self._bounds, self._end = clock, bounds or Bounds(), end
        self._arrivals = self._attempts = 0
        self._alone_since: dict[SplitRole, float] = {}
        self._last_loss = "none came up"

    @property
    def prefill(self) -> list[Prefill]:
        """Return the prefill workers that are up."""
        return [one for one in self._workers if one.up and one.role is SplitRole.PREFILL]  # type: ignore[misc]

    @property
    def decode(self) -> list[Decode]:
        """Return the decode workers that are up."""
        return [one for one in self._workers if one.up and one.role is SplitRole.DECODE]  # type: ignore[misc]

    def begin(self) -> None:
        """Raise :class:`InvalidValue` for ranks whose blocks are not alike, by the first fact that differs (G31)."""
        for worker in self._workers[1:]:
            for rank, (mine, its) in enumerate(zip(self._workers[0].peers, worker.peers, strict=True)):
                check_facts(mine.facts, its.facts, f"{worker.name}, rank {rank},", "--split")

    def came_up(self, worker: Prefill | Decode) -> None:
        """Check a restarted worker as :meth:`begin` does."""
        for other in [one for one in self._workers if one is not worker and one.up]:
            for mine, its in zip(other.peers, worker.peers, strict=True):
                check_facts(mine.facts, its.facts, worker.name, "--split")

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._check(request)
        self._arrivals += 1
        self.journeys[request.request_id] = journey = Journey(self._arrivals, request, since=self._clock())
        self._wait(journey)

    def _wait(self, journey: Journey) -> None:
        bisect.insort(self.front, journey, key=lambda one: one.rank)

    def _move(self, journey: Journey, event: Event) -> None:
        journey.move(event, self._clock())

    # -- forward --------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Expire old attempts, assign requests to prefill workers with room, and offer prefilled requests to decode
        workers."""
        self._expire()
        self._give_up_alone()
        held = [one for one in self.journeys.values() if one.state in (State.PREFILLING, State.HELD)]
        for journey in sorted(held, key=lambda one: one.rank):
            self._ask(journey)
        while self.front and self._place(self.front[0]):
            pass

    def _next_attempt(self) -> int:
        """Return the next attempt number. One counter serves all requests, because a name may be reused and its
        attempts must increase."""
        self._attempts += 1
        return self._attempts

    def _place(self, journey: Journey) -> bool:
        room = [worker for worker in self.prefill if worker.scheduler.has_room(journey.request)]
        if journey.careful and not any(one.scheduler.has_place(journey.request) for one in self.decode):
            return False
        if not room:
            return False
        self.front.remove(journey)
        worker = min(room, key=lambda one: one.scheduler.load + one.scheduler.kept)
        worker.scheduler.add(journey.request)
        journey.prefill = worker
        journey.attempt = self._next_attempt()
        self._move(journey, Event.PLACED)
        self._ask(journey)
        return True

    def _ask(self, journey: Journey) -> None:
        """Offer the request to the decode worker with most room, if any has enough."""
        assert journey.prefill is not None
        for worker in sorted(self.decode, key=lambda one: (-one.scheduler.pool.free, one.scheduler.load)):
            blocks = worker.scheduler.reserve(journey.request, attempt := self._next_attempt())
            if blocks is None:
                continue
            journey.attempt, journey.decode = attempt, worker
            journey.reserved, journey.arrived, journey.over = set(), set(), set()
            self._move(journey, Event.ASKED)
            for rank, source in enumerate(journey.prefill.peers):
                worker.say(Reserve(*journey.key, blocks, source), rank)
            return

    def hear(self, word: SplitWord, worker: Prefill | Decode) -> None:
        """Handle a message of ``worker``'s rank about an attempt. Of an outdated attempt only its end counts."""
        key: Key = word.request, word.attempt
        if isinstance(word, Over) and worker.is_over(key, word.rank):
            return
        journey = self.journeys.get(word.request)
        if journey is None or journey.attempt != word.attempt or journey.state not in ON_OFFER:
            return
        if isinstance(word, Reserved):
            if _last_of(journey.reserved, word.rank, worker):
                self._reserved(journey)
        elif isinstance(word, Arrived):
            if _last_of(journey.arrived, word.rank, worker):
                self._arrived(journey)
        else:
            journey.why, journey.failed = word.why, journey.failed + 1
            if worker is journey.decode:
                journey.over.add(word.rank)
            self._lose_offer(journey)

    def _reserved(self, journey: Journey) -> None:
        assert journey.prefill is not None
        assert journey.decode is not None
        self._move(journey, Event.RESERVED)
        for rank, peer in enumerate(journey.decode.peers):
            journey.prefill.say(SendTo(*journey.key, peer), rank)

    def _arrived(self, journey: Journey) -> None:
        self._move(journey, Event.ARRIVED)
        if journey.state is State.INSERTING:
            self._insert(journey)

    def took(self, worker: Prefill | Decode, record: OutputRecord, ended: Sequence[Finished]) -> None:
        """Handle the arrival of a worker's output."""
        if worker.role is SplitRole.DECODE:
            self._inserted(worker, record)  # type: ignore[arg-type]
        for finished in ended:
            self.finish(finished)
        if worker.role is SplitRole.PREFILL:
            rows = record.rows() if self._with_drafts and record.drafts is not None else ()
            drafts = {row.request_id: tuple(row.drafts.tolist()) for row in rows if row.drafts is not None}
            self._first_tokens(worker, drafts)  # type: ignore[arg-type]

    def _first_tokens(self, worker: Prefill, drafts: dict[str, tuple[int, ...]]) -> None:
        """Offer the requests that got their first token in the prefill worker's output."""
        found, worker.scheduler.prefilled = worker.scheduler.prefilled, []
        for one in found:
            self._first_token(self.journeys[one.request_id], one, drafts.get(one.request_id, ()))

    def _first_token(self, journey: Journey, one: Prefilled, drafts: tuple[int, ...]) -> None:
        journey.first, journey.drafts, journey.held_since = one.tokens[-1], drafts, self._clock()
        if one.aborted:
            self._end_held(journey, FinishReason.ABORT)
            return
        self._move(journey, Event.TOKEN)
        if journey.state is State.INSERTING:
            self._insert(journey)

    def _insert(self, journey: Journey) -> None:
        assert journey.decode is not None
        journey.decode.scheduler.insert(journey.key, journey.first, journey.drafts)

    def _inserted(self, worker: Decode, record: OutputRecord) -> None:
        """Release the prefill worker's blocks of requests that a decode worker's record names."""
        for name in record.request_ids:
            journey = self.journeys.get(name)
            if journey is not None and journey.state is State.INSERTING and journey.decode is worker:
                self._move(journey, Event.INSERTED)
                self._let_go(journey)

    # -- back -----------------------------------------------------------------------------------------------------

    def _lose_offer(self, journey: Journey) -> None:
        """End the decode worker's promise. The request is offered again later, or ends after too many failures."""
        self._withdraw_offer(journey)
        self._move(journey, Event.OFFER_LOST)
        if journey.failed >= MOST_FAILURES and journey.state in HELD:
            why = f"no decode worker took over request {journey.name!r} in {journey.failed} tries: {journey.why}"
            self._end_held(journey, FinishReason.ERROR, why)

    def _withdraw_offer(self, journey: Journey) -> None:
        worker, journey.decode = journey.decode, None
        if worker is not None and worker.up:
            scheduler, key = worker.scheduler, journey.key
            worker.release(key, lambda: scheduler.drop(key), frozenset(journey.over))

    def _let_go(self, journey: Journey) -> None:
        """Release the blocks of the prefill worker."""
        worker, journey.prefill = journey.prefill, None
        if worker is not None and worker.up and worker.scheduler.keeps(journey.name):
            scheduler, name = worker.scheduler, journey.name
            worker.release(journey.key, lambda: scheduler.release(name))

    def _to_front(self, journey: Journey, event: Event, output: Sequence[int]) -> None:
        self._move(journey, event)
        journey.turn_back(tuple(output))
        self._wait(journey)

    def _expire(self) -> None:
        """Expire attempts that have waited for too long."""
        now, bounds = self._clock(), self._bounds
        for journey in list(self.journeys.values()):
            waited = now - journey.since
            slow = journey.state in (State.OFFERED, State.HELD_OFFERED, State.HELD_MOVING)
            if slow and waited > bounds.move:
                assert journey.decode is not None
                journey.why = f"{journey.decode.name} did not answer within {bounds.move:g} s"
                journey.failed += 1
                self._lose_offer(journey)
            elif journey.state is State.HELD and now - journey.held_since > bounds.hold:
                self._let_go(journey)
                journey.careful = True
                self._to_front(journey, Event.GIVEN_UP, journey.output)

    def _give_up_alone(self) -> None:
        """End requests that need a role which has had no worker for too long, and will get none."""
        for role in (SplitRole.PREFILL, SplitRole.DECODE):
            workers = [one for one in self._workers if one.role is role]
            if any(one.up for one in workers):
                self._alone_since.pop(role, None)
                continue
            since = self._alone_since.setdefault(role, self._clock())
            coming = any(one.rank_executor is not None for one in workers)
            if coming and self._clock() - since <= self._bounds.alone:
                continue
            states = frozenset({State.WAITING}) if role is SplitRole.PREFILL else HELD | {State.WAITING}
            why = f"no {role.name.lower()} worker is left" + ("" if not coming else f" for {self._bounds.alone:g} s")
            self._fail(states, f"{why} ({self._last_loss}); give more workers, or --restart")

    def lost(self, worker: Prefill | Decode, error: HalError) -> None:
        """Handle the loss of a worker with its blocks. Its delivered output was taken before."""
        self._last_loss = f"{worker.name} was lost: {error.what}"
        if not any(one.up for one in self._workers if one.role is worker.role and one is not worker):
            self._alone_since.setdefault(worker.role, self._clock())
        if worker.role is SplitRole.PREFILL:
            self._lost_prefill(worker)  # type: ignore[arg-type]
        else:
            self._lost_decode(worker)  # type: ignore[arg-type]

    def forsaken(self, error: HalError) -> None:
        """End the requests that need the role if no other worker has it."""

    def _lost_prefill(self, worker: Prefill) -> None:
        ended = {one.request_id: one for one in worker.withdraw()[1]}
        for journey in [one for one in self.journeys.values() if one.prefill is worker]:
            journey.prefill = None
            if journey.name in ended:
                self.finish(ended[journey.name])
            elif journey.state is State.INSERTING:
                self._move(journey, Event.PREFILL_LOST)
            else:
                if journey.state in ON_OFFER:
                    self._withdraw_offer(journey)
                self._to_front(journey, Event.PREFILL_LOST, journey.output)

    def _lost_decode(self, worker: Decode) -> None:
        going_on, told = worker.withdraw()
        outputs, ended = {one.request_id: one.output for one in going_on}, {one.request_id: one for one in told}
        for journey in [one for one in self.journeys.values() if one.decode is worker]:
            journey.decode = None
            if journey.name in ended:
                self.finish(ended[journey.name])
            elif journey.state is State.DECODING:
                self._to_front(journey, Event.DECODE_LOST, outputs[journey.name])
            else:
                self._move(journey, Event.OFFER_LOST)

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """End a request in any state. If it has a slot, its record reports the end."""
        if (journey := self.journeys.get(request_id)) is None:
            return
        ended: Finished | None = None
        if journey.state is State.WAITING:
            self._end_waiting(journey, FinishReason.ABORT)
        elif journey.state in HELD:
            self._end_held(journey, FinishReason.ABORT)
        elif journey.state in AT_PREFILL:
            assert journey.prefill is not None
            ended = journey.prefill.scheduler.abort(request_id)
        elif journey.state in AT_DECODE:
            assert journey.decode is not None
            if journey.decode.scheduler.take_back(journey.key):
                self._withdraw_offer(journey)
                self._end_held(journey, FinishReason.ABORT)
            else:
                ended = journey.decode.scheduler.abort(request_id)
        if ended is not None:
            self.finish(ended)

    def finish(self, ended: Finished) -> None:
        """Release a request that ended in a scheduler, on all workers."""
        journey = self.journeys[ended.request_id]
        if journey.state in AT_PREFILL and journey.prefill is not None:
            journey.prefill.say(Release(*journey.key))  # it may know the blocks' destination
        if journey.state in ON_OFFER:
            self._withdraw_offer(journey)
        self._let_go(journey)
        self._over(journey, ended)

    def _end_waiting(self, journey: Journey, reason: FinishReason, message: str = "") -> None:
        self.front.remove(journey)
        self._over(journey, Finished(journey.name, journey.output, reason, message, reported=False))

    def _end_held(self, journey: Journey, reason: FinishReason, message: str = "") -> None:
        self.finish(Finished(journey.name, journey.output, reason, message, reported=False))

    def _fail(self, states: frozenset[State], message: str) -> None:
        """End every request in one of these states with an error."""
        for journey in [one for one in self.journeys.values() if one.state in states]:
            end = self._end_waiting if journey.state is State.WAITING else self._end_held
            end(journey, FinishReason.ERROR, message)

    def _over(self, journey: Journey, ended: Finished) -> None:
        self._move(journey, Event.END)
        del self.journeys[journey.name]
        self._end(ended)


def _last_of(said: set[int], rank: int, worker: Prefill | Decode) -> bool:
    """Record a rank's message. Return whether all ranks have sent it. Repeated messages count once."""
    fresh = rank not in said
    said.add(rank)
    return fresh and len(said) == len(worker.ranks)
