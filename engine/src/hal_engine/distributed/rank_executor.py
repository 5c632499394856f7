"""All ranks of a run, as their engine uses them: start, comparison, steps, messages, end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from hal_core import HalError, InvalidValue, OutputRecord, Task

from hal_engine.timeouts import TIMEOUTS, Timeouts

from .control_channel import EngineChannel
from .control_messages import (
    PROTOCOL,
    Agreed,
    Counts,
    Delivery,
    Failed,
    Hello,
    Left,
    Message,
    Progress,
    Raised,
    Setup,
    Stop,
    Up,
)
from .errors import RankLost
from .launch import Starter
from .layout import RankLayout
from .rank_info import RankInfo, difference
from .step_clock import StepClock
from .steps import StepOrder, orders_of

if TYPE_CHECKING:
    from hal_core.handover import Description

    from hal_engine.transport.curve import CurveKeys

log = logging.getLogger("hal")
_Wanted = TypeVar("_Wanted", Hello, Up)


class RankExecutor:
    """The ranks of one run, the executor of their engine (:class:`hal_engine.engine.Executor`). One thread uses it."""

    def __init__(
        self,
        setup: Setup,
        starter: Starter,
        *,
        url: str | None = None,
        keys: CurveKeys | None = None,
        look: Callable[[], None] = lambda: None,
        starting: float | None = None,
        name_of: Callable[[int], str] = str,
        key_of: Callable[[int], str] = lambda rank: "",
    ) -> None:
        """Begin to start the ranks. Call :meth:`assemble` until it returns True.

        ``url``: a tcp address to listen on, with ``keys``; by default a private ipc address of this host. ``look`` is
        called from time to time while ranks start; what it raises ends the start. ``starting``: seconds until all ranks
        must be up (``TIMEOUTS.starting``); a rank whose connection closes earlier is lost at once. ``name_of``: name of
        a rank in the error of a loss. ``key_of``: a rank's public key, "" for another number; with ``keys``.
        Raises :class:`InvalidValue`, the same on every rank, for errors of the user's, and :class:`RankLost` if ranks
        do not come up or fail for another reason.
        """
        self.layout, self._starter, self._look = RankLayout(setup.tp, setup.dp), starter, look
        self._name_of = name_of
        self._starting = TIMEOUTS.starting if starting is None else starting
        self._clock = StepClock(self.layout.dp, TIMEOUTS.step)
        self._numbers, self._taken = [0] * self.layout.dp, [0] * self.layout.dp  # of each group's steps
        self._failed, self._records = list[Failed](), deque[tuple[int, OutputRecord]]()
        self._raised = dict[int, Raised]()  # by rank, until it is answered
        self._left, self._drafts = dict[int, tuple[Delivery, ...]](), dict[int, tuple[int, int, int]]()
        self._spent = dict[int, Counts]()
        self.drafted: Counter[str] = Counter()  #: drafts of each request; the engine takes them out
        self.progress: deque[Progress] = deque()  #: messages of ranks about KV transfer; the engine takes them out
        # of ranks with a role, the description that the other role's ranks need
        self.peers: tuple[Description | None, ...] = ()
        self.rank_info = RankInfo("", {}, "")
        self._lost: RankLost | None = None
        self.again: Callable[[], bool] = lambda: False  #: whether lost ranks will be restarted
        self._setup = setup
        self.channel = EngineChannel(url, keys, key_of, self.layout.size)
        try:
            starter.start(self.channel.url)
        except BaseException:
            self._end(0.0)
            raise
        self._assembling: Iterator[None] | None = self._assemble()

    def assemble(self) -> bool:
        """Continue the start. Return whether the ranks are up. Raises as the constructor."""
        if self._assembling is not None:
            try:
                next(self._assembling)
            except StopIteration:
                self._assembling = None
            except BaseException:
                self._assembling = None
                self._end(0.0)
                raise
        return self._assembling is None

    @property
    def sockets(self) -> tuple[Any, ...]:
        """Return what to poll. If it can be read, :meth:`assemble` or :meth:`receive` may have input."""
        return self.channel.sockets

    # -- steps ----------------------------------------------------------------------------------------------------

    def order(self, group: int, tasks: Sequence[Task], taken: int = 0) -> None:
        """Send a group its next step. See :class:`hal_engine.engine.Executor`. Raises :class:`RankLost`."""
        self._numbers[group] += 1
        order = StepOrder(group, self._numbers[group], orders_of(tasks), taken)
        if missed := self.channel.order(order, *self.layout.members(group)):
            raise self._lose(missed[0], "it takes no messages any more")
        self._clock.given(group)

    def receive(self, timeout: float) -> tuple[int, OutputRecord] | None:
        """Return the next record with the number of its group; None after ``timeout`` seconds. Raises
        :class:`RankLost`."""
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            self._take_messages(0.0 if self._records else max(0.0, min(left, TIMEOUTS.look)))
            if self._records:
                group, record = self._records.popleft()
                self._clock.taken(group)
                self._taken[group] += 1
                self._answer(group)
                return group, record
            self._check()
            if left <= 0:
                return None

    def rest(self) -> list[tuple[int, OutputRecord]]:
        """Return, after a loss, the records that the remaining ranks still send until they end."""
        found, end = list[tuple[int, OutputRecord]](), time.monotonic() + TIMEOUTS.ranks_end
        senders = {self.layout.members(number)[0] for number in range(self.layout.dp)}
        while True:
            over = senders <= self._left.keys() | self.channel.gone().keys() or time.monotonic() > end
            over = over or bool(self._starter.ended())
            self._take_messages(TIMEOUTS.look)
            found += self._records
            self._records.clear()
            if over:
                return found

    @property
    def drafts(self) -> tuple[int, ...]:
        """Return the draft counts that ranks have reported: fed, accepted, turns of slots that decode."""
        return tuple(sum(column) for column in zip((0, 0, 0), *self._drafts.values(), strict=True))

    @property
    def device_seconds(self) -> float | None:
        """Return the device's time in steps, of the first rank of each group together; None if it is not measured."""
        found = [spent.device for spent in self._spent.values() if spent.device is not None]
        return sum(found) if found else None

    @property
    def rank_seconds(self) -> float | None:
        """Return the processor time of the threads of these ranks since their first step; None if not reported."""
        found = [spent.host for spent in self._spent.values() if spent.host is not None]
        return sum(found) if found else None

    @property
    def undelivered(self) -> list[Delivery]:
        """Return the tokens that the reader of an additional sink has not acknowledged, as ranks reported them."""
        return [delivery for deliveries in self._left.values() for delivery in deliveries]

    def stop(self) -> None:
        """End the ranks in order, after everything was sent."""
        self.channel.send(Stop())
        end = time.monotonic() + TIMEOUTS.ranks_end
        while len(self._left) < self.layout.dp and not self._starter.ended() and time.monotonic() < end:
            self._take_messages(TIMEOUTS.look)
        self._end(TIMEOUTS.ranks_end)

    def close(self) -> None:
        """End the ranks, by force if they cannot end in order. Idempotent."""
        self._end(TIMEOUTS.ranks_end_forced)

    # -- the start ------------------------------------------------------------------------------------------------

    def _assemble(self) -> Iterator[None]:
        """Yield between the parts of the start. No part waits."""
        hellos = yield from self._collect(Hello)
        for rank, hello in hellos.items():
            if hello.size != self.layout.size or hello.protocol != PROTOCOL:
                raise self._refuse(
                    f"rank {rank} is one of {hello.size} and has protocol version {hello.protocol}; this engine has "
                    f"{self.layout.size} of version {PROTOCOL}",
                    "start as many ranks as --tp times --dp, all of one version",
                )
        self._compare({rank: hello.facts for rank, hello in hellos.items()})
        self.channel.send(self._setup)
        self._compare({rank: hello.facts for rank, hello in (yield from self._collect(Hello)).items()})
        self.channel.send(Agreed())
        up = yield from self._collect(Up)
        indices = tuple(up[rank].index for rank in sorted(up))
        first, overlap = up[0], all(message.overlap for message in up.values())
        vocabulary = min(message.vocab_size for message in up.values())
        self.peers = tuple(up[rank].peer for rank in sorted(up))
        named = first.device, first.fallbacks, first.substituted
        self.rank_info = RankInfo(*named, indices, overlap, first.no_overlap, vocabulary, first.chunk, first.supports)

    def _collect(self, wanted: type[_Wanted]) -> Generator[None, None, dict[int, _Wanted]]:
        """Collect this message from every rank."""
        found: dict[int, _Wanted] = {}
        began = logged = time.monotonic()
        while len(found) < self.layout.size:
            for rank, message in self.channel.receive():
                if isinstance(message, wanted):
                    found[rank] = message
                else:
                    self._take(rank, message)
            if self._failed:
                raise self._failure()
            self._look()
            missing = sorted(set(range(self.layout.size)) - set(found))
            self._check_start(missing, began + self._starting)
            if missing and time.monotonic() > logged + TIMEOUTS.start_line:
                logged, limit = time.monotonic(), f"{self._starting:g} s ({Timeouts.starting.variable})"
                log.warning("waited %.0f s for rank(s) %s, at most %s", logged - began, missing, limit)
            if missing:
                yield
        return found

    def _check_start(self, missing: Sequence[int], end: float) -> None:
        """Raise the loss of ranks that cannot come up any more, or have not until ``end``."""
        cure = "see their output; check that Paddle imports and that ports of this host are free"
        if how := self._starter.ended():
            raise self._lose(missing[0] if missing else 0, f"rank(s) {missing} did not come up: {how}", cure)
        if gone := self.channel.gone():
            rank, why = next(iter(gone.items()))
            raise self._lose(rank, self._ended_by() or why, cure)
        if missing and time.monotonic() > end:
            why = f"rank(s) {missing} did not come up: no message for {self._starting:g} s"
            raise self._lose(missing[0], why, f"{cure}, or give them more time ({Timeouts.starting.variable})")

    def _failure(self) -> HalError:
        """Handle a rank's failure: a refusal if the rank says so, else its loss."""
        rank, message = self._blamed()
        if message.refused:
            return self._refuse((f"rank {message.rank}: " if self.layout.size > 1 else "") + message.what, message.cure)
        lost = self._lose(rank, message.what, message.cure)
        self._starter.end(TIMEOUTS.ranks_end_forced)
        return lost

    def _compare(self, facts: Mapping[int, Mapping[str, str]]) -> None:
        """Refuse ranks that differ, by the first label that differs."""
        if what := difference(facts):
            raise self._refuse(what, "start every rank with the same files, options and versions")

    def _refuse(self, what: str, cure: str) -> InvalidValue:
        self.channel.send(Stop(what, cure, refused=True))
        self._starter.end(TIMEOUTS.ranks_end)
        return InvalidValue(what, cure=cure)

    # -- the end --------------------------------------------------------------------------------------------------

    def _take_messages(self, timeout: float) -> None:
        for rank, message in self.channel.receive(timeout):
            self._take(rank, message)

    def _take(self, rank: int, message: Message | OutputRecord) -> None:
        if isinstance(message, OutputRecord):
            self._records.append((self.layout.number_of(rank), message))
        elif isinstance(message, Failed | Raised) and message.trace:
            log.debug("rank %s, where it raised:\n%s", self._name_of(message.rank), message.trace)
        if isinstance(message, Failed):
            self._failed.append(message)
        elif isinstance(message, Raised):
            self._raised[rank] = message
            self._answer(self.layout.number_of(rank))
        elif isinstance(message, Progress):
            self.progress.append(message)
        elif isinstance(message, Left):
            self._left[rank] = tuple(message.undelivered)
        elif isinstance(message, Counts):
            self._count(rank, message)

    def _count(self, rank: int, counts: Counts) -> None:
        self.drafted.update(counts.drafted)
        if counts.drafts is not None:
            self._drafts[rank] = counts.drafts
        if counts.host is not None:
            self._spent[rank] = counts

    def _answer(self, group: int) -> None:
        """Answer the ranks of a group whose runners raised, once all of them have, or the group's output shows that its
        first rank did not. Ranks that get no answer end after ``TIMEOUTS.raised``."""
        members = self.layout.members(group)
        raised = {rank: self._raised[rank] for rank in members if rank in self._raised}
        found = {(message.step, message.method, message.kind) for message in raised.values()}
        step = max((message.step for message in raised.values()), default=0)
        if raised and (len(raised) == len(members) or self._taken[group] >= step):
            self.channel.send(Agreed(step, len(raised) == len(members) and len(found) == 1), *raised)
            for rank in raised:
                del self._raised[rank]

    def _check(self) -> None:
        """Raise the ranks' failure."""
        if self._failed:
            rank, message = self._blamed()
            raise self._failure() if message.refused else self._lose(rank, message.what)
        if lost := self.channel.silent():
            rank, why = next(iter(lost.items()))
            raise self._lose(rank, self._ended_by() or why)
        if how := self._starter.ended():
            raise self._lose(0, how)
        if (late := self._clock.late()) is not None:
            ranks = list(self.layout.members(late))
            why = f"rank(s) {ranks} have not ended the step within {self._clock.limit:g} s"
            cure = f"see what holds it up; where steps take that long, give them more time ({Timeouts.step.variable})"
            raise self._lose(ranks[0], why, cure)

    def _ended_by(self) -> str:
        """Return what the starter reports of an end that the connection has shown first, with the rank's last lines;
        "" if it reports nothing in time."""
        end = time.monotonic() + 2 * (TIMEOUTS.loss_reason + TIMEOUTS.look)  # a starter waits nearly as long itself
        while not (how := self._starter.ended()) and time.monotonic() < end:
            self._take_messages(TIMEOUTS.look)
        return how

    def _blamed(self) -> tuple[int, Failed]:
        """Return the lost rank and the message with the reason: its own if there is one, else that of another rank."""
        end = time.monotonic() + 2 * TIMEOUTS.loss_reason
        while True:
            own = [message for message in self._failed if not message.lost and not message.vague]
            named = [message for message in self._failed if message.lost]
            if own:
                return own[0].rank, own[0]
            ended = any("process" in message.what for message in named)
            if ended or (self._failed and time.monotonic() > end):
                message = (named or self._failed)[0]
                return (message.lost[0] if message.lost else message.rank), message
            self._take_messages(TIMEOUTS.look)

    def _lose(self, rank: int, why: str, cure: str = "") -> RankLost:
        """Send every rank the verdict, once. Return it as an error."""
        if self._lost is None:
            step = self._numbers[self.layout.number_of(rank)]
            what = f"rank {self._name_of(rank)} was lost {f'in step {step}' if step else 'at its start'}: {why}"
            cure = cure or "see its output, and run the requests again (--restart does both)"
            self.channel.send(Stop(what, cure, rank, step, again=self.again()))
            self._lost = RankLost(what, rank, step, cure=cure)
        return self._lost

    def _end(self, patience: float) -> None:
        with contextlib.closing(self.channel):
            self._starter.end(patience)
