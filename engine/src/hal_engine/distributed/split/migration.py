"""Migration of requests from prefill to decode workers: the front of an engine whose workers have two roles.

A prefill worker with room takes the first waiting request. A decode worker is then offered the request, and others in
turn until one has room. Blocks move from rank to rank, by the table of :mod:`hal_engine.distributed.split.states`. The
engine calls this module with each message, and messages go out through the workers: no call waits.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hal_core import FinishReason, HalError, OutputRecord, Request, SplitRole
from hal_core.handover import check_facts

from hal_engine.distributed.control_messages import Move, Progress, Release
from hal_engine.distributed.worker import RankWorker
from hal_engine.engine import Finished
from hal_engine.engine.roles import DecodeScheduler, Key, Prefilled, PrefillScheduler
from hal_engine.timeouts import TIMEOUTS

from .request import SplitRequest
from .states import AT_DECODE, AT_PREFILL, HELD, ON_OFFER, Event, State

if TYPE_CHECKING:
    from hal_engine.engine.scheduler import Admitted

    Prefill = RankWorker[PrefillScheduler]
    Decode = RankWorker[DecodeScheduler]

MOST_FAILURES = 8
"""Offers of a request that decode workers may refuse before it ends with an error."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._check, self._with_drafts = workers, check, drafts
        self.split_requests: dict[str, SplitRequest] = {}
        self.front: list[SplitRequest] = []
        self._clock, self._end = clock, end
        self._arrivals = self._attempts = 0
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

    def admit_all(self, requests: Sequence[Request]) -> Sequence[Admitted]:
        """Admit none here: a worker does when it gets its request."""
        return [None] * len(requests)

    def add(self, request: Request, admitted: Admitted = None) -> None:
        """Queue a new request."""
        self._check(request)
        self._arrivals += 1
        self.split_requests[request.request_id] = split_request = SplitRequest(
            self._arrivals, request, since=self._clock()
        )
        self._wait(split_request)

    def _wait(self, split_request: SplitRequest) -> None:
        bisect.insort(self.front, split_request, key=lambda one: one.rank)

    def _move(self, split_request: SplitRequest, event: Event) -> None:
        split_request.move(event, self._clock())

    # -- forward --------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Expire old attempts, assign requests to prefill workers with room, and offer prefilled requests to decode
        workers."""
        self._expire()
        self._give_up_alone()
        held = [one for one in self.split_requests.values() if one.state in (State.PREFILLING, State.HELD)]
        for split_request in sorted(held, key=lambda one: one.rank):
            self._ask(split_request)
        while self.front and self._place(self.front[0]):
            pass

    def _next_attempt(self) -> int:
        """Return the next attempt number. One counter serves all requests, because a name may be reused and its
        attempts must increase."""
        self._attempts += 1
        return self._attempts

    def _place(self, split_request: SplitRequest) -> bool:
        room = [worker for worker in self.prefill if worker.scheduler.has_room(split_request.request)]
        if split_request.careful and not any(one.scheduler.has_place(split_request.request) for one in self.decode):
            return False
        if not room:
            return False
        self.front.remove(split_request)
        worker = min(room, key=lambda one: one.scheduler.load + one.scheduler.kept)
        worker.scheduler.add(split_request.request)
        split_request.prefill = worker
        split_request.attempt = self._next_attempt()
        self._move(split_request, Event.PLACED)
        self._ask(split_request)
        return True

    def _ask(self, split_request: SplitRequest) -> None:
        """Offer the request to the decode worker with most room, if any has enough."""
        assert split_request.prefill is not None
        for worker in sorted(self.decode, key=lambda one: (-one.scheduler.pool.free, one.scheduler.load)):
            blocks = worker.scheduler.reserve(split_request.request, attempt := self._next_attempt())
            if blocks is None:
                continue
            split_request.attempt, split_request.decode = attempt, worker
            split_request.reserved, split_request.arrived, split_request.over = set(), set(), set()
            self._move(split_request, Event.ASKED)
            for rank, source in enumerate(split_request.prefill.peers):
                worker.send(Move(*split_request.key, source, blocks), rank)
            return

    def on_message(self, message: Progress, worker: Prefill | Decode) -> None:
        """Handle a message of ``worker``'s rank about an attempt. Of an outdated attempt only its end counts."""
        key: Key = message.request, message.attempt
        if message.state == "over" and worker.is_over(key, message.rank):
            return
        split_request = self.split_requests.get(message.request)
        if split_request is None or split_request.attempt != message.attempt or split_request.state not in ON_OFFER:
            return
        if message.state == "reserved":
            if _last_of(split_request.reserved, message.rank, worker):
                self._reserved(split_request)
        elif message.state == "arrived":
            if _last_of(split_request.arrived, message.rank, worker):
                self._arrived(split_request)
        else:
            split_request.why, split_request.failed = message.why, split_request.failed + 1
            if worker is split_request.decode:
                split_request.over.add(message.rank)
            self._lose_offer(split_request)

    def _reserved(self, split_request: SplitRequest) -> None:
        assert split_request.prefill is not None
        assert split_request.decode is not None
        self._move(split_request, Event.RESERVED)
        for rank, peer in enumerate(split_request.decode.peers):
            split_request.prefill.send(Move(*split_request.key, peer), rank)

    def _arrived(self, split_request: SplitRequest) -> None:
        self._move(split_request, Event.ARRIVED)
        if split_request.state is State.INSERTING:
            self._insert(split_request)

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
            self._first_token(self.split_requests[one.request_id], one, drafts.get(one.request_id, ()))

    def _first_token(self, split_request: SplitRequest, one: Prefilled, drafts: tuple[int, ...]) -> None:
        split_request.first, split_request.drafts, split_request.held_since = one.tokens[-1], drafts, self._clock()
        if one.aborted:
            self._end_held(split_request, FinishReason.ABORT)
            return
        self._move(split_request, Event.TOKEN)
        if split_request.state is State.INSERTING:
            self._insert(split_request)

    def _insert(self, split_request: SplitRequest) -> None:
        assert split_request.decode is not None
        split_request.decode.scheduler.insert(split_request.key, split_request.first, split_request.drafts)

    def _inserted(self, worker: Decode, record: OutputRecord) -> None:
        """Release the prefill worker's blocks of requests that a decode worker's record names."""
        for name in record.request_ids:
            split_request = self.split_requests.get(name)
            if split_request is not None and split_request.state is State.INSERTING and split_request.decode is worker:
                self._move(split_request, Event.INSERTED)
                self._let_go(split_request)

    # -- back -----------------------------------------------------------------------------------------------------

    def _lose_offer(self, split_request: SplitRequest) -> None:
        """End the decode worker's promise. The request is offered again later, or ends after too many failures."""
        self._withdraw_offer(split_request)
        self._move(split_request, Event.OFFER_LOST)
        if split_request.failed >= MOST_FAILURES and split_request.state in HELD:
            tries = f"{split_request.failed} tries: {split_request.why}"
            why = f"no decode worker took over request {split_request.name!r} in {tries}"
            self._end_held(split_request, FinishReason.ERROR, why)

    def _withdraw_offer(self, split_request: SplitRequest) -> None:
        worker, split_request.decode = split_request.decode, None
        if worker is not None and worker.up:
            scheduler, key = worker.scheduler, split_request.key
            worker.release(key, lambda: scheduler.drop(key), frozenset(split_request.over))

    def _let_go(self, split_request: SplitRequest) -> None:
        """Release the blocks of the prefill worker."""
        worker, split_request.prefill = split_request.prefill, None
        if worker is not None and worker.up and worker.scheduler.keeps(split_request.name):
            scheduler, name = worker.scheduler, split_request.name
            worker.release(split_request.key, lambda: scheduler.release(name))

    def _to_front(self, split_request: SplitRequest, event: Event, output: Sequence[int]) -> None:
        self._move(split_request, event)
        split_request.turn_back(tuple(output))
        self._wait(split_request)

    def _expire(self) -> None:
        """Expire attempts that have waited for too long: for an answer, for sealed blocks, or for a decode worker."""
        now, most = self._clock(), TIMEOUTS.hold
        for split_request in list(self.split_requests.values()):
            waited = now - split_request.since
            slow = split_request.state in (State.OFFERED, State.HELD_OFFERED, State.HELD_MOVING)
            if slow and waited > most:
                assert split_request.decode is not None
                split_request.why = f"{split_request.decode.name} did not answer within {most:g} s"
                split_request.failed += 1
                self._lose_offer(split_request)
            elif split_request.state is State.HELD and now - split_request.held_since > most:
                self._let_go(split_request)
                split_request.careful = True
                self._to_front(split_request, Event.GIVEN_UP, split_request.output)

    def _give_up_alone(self) -> None:
        """End requests that need a role if none of its workers runs or is being started.

        Requests wait through the start of a worker, for which its ranks have a limit (``TIMEOUTS.starting``)."""
        for role in (SplitRole.PREFILL, SplitRole.DECODE):
            if any(one.rank_executor is not None for one in self._workers if one.role is role):
                continue
            states = frozenset({State.WAITING}) if role is SplitRole.PREFILL else HELD | {State.WAITING}
            why = f"no {role.name.lower()} worker is left ({self._last_loss})"
            self._fail(states, f"{why}; give more workers, or --restart")

    def lost(self, worker: Prefill | Decode, error: HalError) -> None:
        """Handle the loss of a worker with its blocks. Its delivered output was taken before."""
        self._last_loss = f"{worker.name} was lost: {error.what}"
        if worker.role is SplitRole.PREFILL:
            self._lost_prefill(worker)  # type: ignore[arg-type]
        else:
            self._lost_decode(worker)  # type: ignore[arg-type]

    def forsaken(self, error: HalError) -> None:
        """End the requests that need the role if no other worker has it."""

    def _lost_prefill(self, worker: Prefill) -> None:
        ended = {one.request_id: one for one in worker.withdraw()[1]}
        for split_request in [one for one in self.split_requests.values() if one.prefill is worker]:
            split_request.prefill = None
            if split_request.name in ended:
                self.finish(ended[split_request.name])
            elif split_request.state is State.INSERTING:
                self._move(split_request, Event.PREFILL_LOST)
            else:
                if split_request.state in ON_OFFER:
                    self._withdraw_offer(split_request)
                self._to_front(split_request, Event.PREFILL_LOST, split_request.output)

    def _lost_decode(self, worker: Decode) -> None:
        going_on, finished = worker.withdraw()
        outputs, ended = {one.request_id: one.output for one in going_on}, {one.request_id: one for one in finished}
        for split_request in [one for one in self.split_requests.values() if one.decode is worker]:
            split_request.decode = None
            if split_request.name in ended:
                self.finish(ended[split_request.name])
            elif split_request.state is State.DECODING:
                self._to_front(split_request, Event.DECODE_LOST, outputs[split_request.name])
            else:
                self._move(split_request, Event.OFFER_LOST)

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """End a request in any state. If it has a slot, its record reports the end."""
        if (split_request := self.split_requests.get(request_id)) is None:
            return
        ended: Finished | None = None
        if split_request.state is State.WAITING:
            self._end_waiting(split_request, FinishReason.ABORT)
        elif split_request.state in HELD:
            self._end_held(split_request, FinishReason.ABORT)
        elif split_request.state in AT_PREFILL:
            assert split_request.prefill is not None
            ended = split_request.prefill.scheduler.abort(request_id)
        elif split_request.state in AT_DECODE:
            assert split_request.decode is not None
            if split_request.decode.scheduler.take_back(split_request.key):
                self._withdraw_offer(split_request)
                self._end_held(split_request, FinishReason.ABORT)
            else:
                ended = split_request.decode.scheduler.abort(request_id)
        if ended is not None:
            self.finish(ended)

    def finish(self, ended: Finished) -> None:
        """Release a request that ended in a scheduler, on all workers."""
        split_request = self.split_requests[ended.request_id]
        if split_request.state in AT_PREFILL and split_request.prefill is not None:
            split_request.prefill.send(Release(*split_request.key))  # it may know the blocks' destination
        if split_request.state in ON_OFFER:
            self._withdraw_offer(split_request)
        self._let_go(split_request)
        self._over(split_request, ended)

    def _end_waiting(self, split_request: SplitRequest, reason: FinishReason, message: str = "") -> None:
        self.front.remove(split_request)
        self._over(split_request, Finished(split_request.name, split_request.output, reason, message, reported=False))

    def _end_held(self, split_request: SplitRequest, reason: FinishReason, message: str = "") -> None:
        self.finish(Finished(split_request.name, split_request.output, reason, message, reported=False))

    def _fail(self, states: frozenset[State], message: str) -> None:
        """End every request in one of these states with an error."""
        for split_request in [one for one in self.split_requests.values() if one.state in states]:
            end = self._end_waiting if split_request.state is State.WAITING else self._end_held
            end(split_request, FinishReason.ERROR, message)

    def _over(self, split_request: SplitRequest, ended: Finished) -> None:
        self._move(split_request, Event.END)
        del self.split_requests[split_request.name]
        self._end(ended)


def _last_of(ranks: set[int], rank: int, worker: Prefill | Decode) -> bool:
    """Record a rank's message. Return whether all ranks have sent it. Repeated messages count once."""
    fresh = rank not in ranks
    ranks.add(rank)
    return fresh and len(ranks) == len(worker.ranks)
