"""Workers of a split without processes: the handling of steps and messages is real, the model is arithmetic.

A token depends on the content of the blocks, so a block that is wrong, or was used too soon, changes tokens. Ranks,
messages and records advance when a test lets them, in any order; a worker can be killed between any two of these.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hal_conformance.fixtures.host_cache import HostCache
from hal_core import FinishReason, OutputRecord, SamplingParams, SlotStatus, SplitRole, TaskKind
from hal_core.handover import BlockTransfer
from hal_engine.distributed.errors import RankLost
from hal_engine.distributed.kv_handover import KvHandover
from hal_engine.distributed.layout import RankLayout
from hal_engine.distributed.rank_info import RankInfo
from hal_engine.distributed.steps import StepOrder, orders_of

END, VOCABULARY = 7, 97
FACTS = {"layout": "one int64 a token"}


def following(tokens):
    """Return the token after these."""
    return (sum((at + 3) * int(token) for at, token in enumerate(tokens)) * 31 + len(tokens)) % VOCABULARY


def expected(request):
    """Return all tokens that a request must receive."""
    tokens, given = list(request.prompt), []
    while len(given) < request.params.max_tokens and END not in given:
        given.append(following(tokens))
        tokens.append(given[-1])
    return given


@dataclass
class Slot:
    """A request in a slot: ``known`` tokens, of which the first ``fed`` lie in ``blocks``."""

    name: str
    role: SplitRole
    prompt: int
    most: int
    known: list[int]
    blocks: list[int]
    fed: int = 0
    drafts: tuple[int, ...] = ()
    stopped: bool = False


class Rank:
    """One rank: an inbox, and its handling of the first message in it."""

    def __init__(self, rank_executor, number, net, clock, blocks, size, drafts):
        self.rank_executor, self.number, self.size, self.most_drafts = rank_executor, number, size, drafts
        self.cache = HostCache(np.full((blocks, 8 * size), 255, np.uint8), FACTS)
        self.wire = net.wire(f"memory://{rank_executor.label}/{number}/{id(self)}")
        self.transfer = BlockTransfer(self.cache, self.wire, clock=clock)
        self.handover = KvHandover(number, self.transfer, size, rank_executor.words.append)
        self.inbox = deque()
        self.slots = {}

    def run(self):
        """Take the next message or step, or poll the transfer if there is none."""
        if not self.inbox:
            self.handover.look()
            return
        received = self.inbox.popleft()
        if isinstance(received, StepOrder):
            self._step(received)
        else:
            self.handover.on_message(received)

    def _step(self, order):
        self.handover.launch(order.tasks)
        record = self._record(order)
        if self.number == 0:
            self.rank_executor.records.append((0, record))
        self.handover.took(record, {})

    def _put(self, slot, tokens):
        for token in tokens:
            row = self.cache.data[slot.blocks[slot.fed // self.size]].view(np.int64)
            row[slot.fed % self.size] = token
            slot.fed += 1

    def _read(self, slot, count):
        rows = self.cache.data[slot.blocks[: -(-count // self.size)]].view(np.int64).reshape(-1)
        return rows[:count].tolist()

    def _record(self, order):
        rows, pieces = [], {}
        for task in order.tasks:
            if task.kind in (TaskKind.PREEMPTED, TaskKind.ABORTED):
                gone = self.slots.pop(task.slot, None)
                assert gone is None or gone.name == task.name  # None: it ended in a step that is still unreported
                aborted = task.kind is TaskKind.ABORTED
                status = SlotStatus.ABORTED if aborted else SlotStatus.PREEMPTED
                rows.append((task.slot, task.name, status, FinishReason.ABORT if aborted else 0, 0, [], ()))
            elif task.request is not None:
                request = task.request
                known = [*request.prompt, *request.output]
                made = Slot(
                    task.name, request.role, len(request.prompt), request.params.max_tokens, known, list(task.blocks)
                )
                if task.kind is TaskKind.REMOTE_PREFILL:
                    made.fed, made.drafts = task.num_computed_tokens, task.drafts
                    made.known.append(task.first_token)
                else:
                    pieces[task.slot] = task.num_scheduled_tokens
                self.slots[task.slot] = made
            elif task.kind is TaskKind.PREFILL_CHUNK:
                pieces[task.slot] = task.num_scheduled_tokens
            elif task.slot in self.slots:  # else it has ended in a step that is still unreported
                self.slots[task.slot].blocks += task.blocks
        for number, slot in sorted(self.slots.items()):
            if (row := self._run(slot, pieces.get(number))) is not None:
                rows.append((number, slot.name, *row))
        self.slots = {number: slot for number, slot in self.slots.items() if not slot.stopped}
        return _as_record(order.number, sorted(rows))

    def _run(self, slot, piece):
        if piece is not None:
            self._put(slot, slot.known[slot.fed : slot.fed + piece])
            if slot.fed < len(slot.known):
                return SlotStatus.NONE, 0, 0, [], ()
        elif slot.fed < len(slot.known) - 1:
            return None
        else:
            self._put(slot, slot.known[slot.fed :])
        position, given = len(slot.known) - slot.prompt, []
        drafts = (*slot.drafts, -1)
        slot.drafts = ()
        for draft in drafts:
            token = following(self._read(slot, slot.fed))
            slot.known.append(token)
            given.append(token)
            if token == END or len(slot.known) - slot.prompt == slot.most:
                slot.stopped = True
                reason = FinishReason.STOP if token == END else FinishReason.LENGTH
                return SlotStatus.TOKEN, reason, position, given, ()
            if token != draft:
                break
            self.rank_executor.accepted += 1
            self._put(slot, [token])
        if slot.role is SplitRole.PREFILL:
            slot.stopped = True
            room = min(self.most_drafts, slot.most - position - 2)
            ahead = list(slot.known)
            for _ in range(max(room, 0)):  # true in every second request
                ahead.append((following(ahead) + len(slot.name) % 2) % VOCABULARY)
            return SlotStatus.TOKEN, 0, position, given, tuple(ahead[len(slot.known) :]) if position == 0 else ()
        return SlotStatus.TOKEN, 0, position, given, ()

    def close(self):
        self.handover.close()


def _as_record(number, rows):
    counts = [len(row[5]) for row in rows]
    drafts = [row[6] for row in rows]
    optional = {}
    if any(drafts):
        optional = {
            "draft_counts": np.array([len(some) for some in drafts], np.int32),
            "drafts": np.array([token for some in drafts for token in some], np.int64),
        }
    return OutputRecord(
        number,
        tuple(row[1] for row in rows),
        np.array([row[2] for row in rows], np.uint8),
        np.array([row[3] for row in rows], np.uint8),
        np.array([row[4] for row in rows], np.int64),
        np.array(counts, np.int32),
        np.array([token for row in rows for token in row[5]], np.int64),
        np.array([bool(row[6]) for row in rows], np.bool_),
        **optional,
    )


@dataclass
class Channel:
    """The messages of an engine to ranks."""

    ranks: list[Rank] = field(default_factory=list)

    def send(self, message, *ranks):
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].inbox.append(message)
        return []


class SimulatedExecutor:
    """As :class:`hal_engine.distributed.rank_executor.RankExecutor`, of ``tp`` ranks that are up after ``slow`` calls
    of ``assemble``.
    """

    sockets = ()
    undelivered = ()
    drafts = (0, 0, 0)

    def __init__(self, label, net, clock, *, tp, blocks, size, drafts=0, slow=0, overlap=False):
        self.label, self.layout = label, RankLayout(tp)
        self.rank_info = RankInfo("simulated", {}, "", overlap=overlap, supports=SamplingParams.__slots__)
        self.words, self.records = deque(), deque()  # on their way to the engine
        self.progress, self._came, self.accepted, self.heard = deque(), deque(), 0, []
        self.channel = Channel()
        self.channel.ranks = [Rank(self, number, net, clock, blocks, size, drafts) for number in range(tp)]
        self.peers = tuple(rank.transfer.describe() for rank in self.channel.ranks)
        self._slow, self._steps = slow, 0
        self.dead = self.closed = False

    def assemble(self):
        self._slow -= 1
        if self.dead:
            raise RankLost("it was killed at its start", 0, 0)
        return self._slow < 0

    def order(self, number, tasks, taken=0):
        if self.dead:
            raise RankLost("it takes no messages any more", 0, self._steps)
        self._steps += 1
        for rank in self.channel.ranks:
            rank.inbox.append(StepOrder(number, self._steps, orders_of(tasks), taken))

    def receive(self, timeout):
        if self._came:
            return self._came.popleft()
        if self.dead:
            raise RankLost("it was killed", 0, self._steps)
        return None

    def deliver(self, *, word):
        """Deliver one message, or one record."""
        if word and self.words:
            self.heard.append(self.words.popleft())
            self.progress.append(self.heard[-1])
        elif not word and self.records:
            self._came.append(self.records.popleft())

    def repeat(self, at):
        """Deliver a message a second time."""
        if self.heard:
            self.progress.append(self.heard[at % len(self.heard)])

    def kill(self, arrives):
        """End it now; ``arrives`` of its records in flight still arrive."""
        if not self.dead:
            self.dead = True
            for _ in range(min(arrives, len(self.records))):
                self.deliver(word=False)
            for rank in self.channel.ranks:
                rank.close()

    def rest(self):
        while self._came:
            yield self._came.popleft()

    def stop(self):
        self.close()

    def close(self):
        self.dead = self.closed = True
        for rank in self.channel.ranks:
            rank.close()
