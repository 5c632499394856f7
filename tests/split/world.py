"""An engine with simulated workers, its deliveries, and the invariants at the end."""

from dataclasses import replace

from hal_conformance.fixtures.memory_wire import MemoryNet
from hal_core import FinishReason, Request, SamplingParams, SlotStatus, StateConfig
from hal_engine.distributed.control_messages import Setup
from hal_engine.distributed.engine import engine_of_ranks

from tests.split.simulated import END, VOCABULARY, SimulatedExecutor, expected

SIZE = 4


class World:
    """``kill``, ``run``, ``deliver`` and ``step`` are the events that a test draws; ``finish`` runs until the end."""

    def __init__(self, split=(1, 1), *, tp=1, blocks=12, slots=3, chunk=5, drafts=0, restarts=0, slow=2, overlap=False):
        self.now = 0.0
        self.net = MemoryNet()
        sizes = StateConfig(num_slots=slots, max_model_len=40, block_size=SIZE, max_draft_tokens=drafts, max_eos=1)
        self.rank_executors, self.delivered, self.ended, self.requests = [], {}, {}, {}

        def rank_executor(setup):
            label = f"{setup.role.name} {setup.number}"
            made = SimulatedExecutor(
                label,
                self.net,
                lambda: self.now,
                tp=tp,
                blocks=blocks,
                size=SIZE,
                drafts=drafts,
                slow=slow,
                overlap=overlap,
            )
            self.rank_executors.append(made)
            return made

        self.engine = engine_of_ranks(
            Setup(
                model="",
                sizes=replace(sizes, vocab_size=VOCABULARY),
                blocks=blocks,
                tp=tp,
                split=split,
                chunk=chunk,
                restart=restarts,
                timeout=1.0,
            ),
            rank_executor,
            on_record=self._take,
            clock=lambda: self.now,
            wait=lambda sockets, seconds: None,
        )

    def _take(self, record):
        for row in record.rows():
            assert row.request_id not in self.ended or not len(row.tokens), f"{row.request_id} was told to have ended"
            if row.status is SlotStatus.TOKEN:
                got = self.delivered[row.request_id]
                assert row.position == len(got), f"{row.request_id}: position {row.position} after {len(got)} tokens"
                got += row.tokens.tolist()

    # -- events -----------------------------------------------------------------------------------------------------

    def submit(self, prompt, max_tokens, name=None):
        name = name or f"r{len(self.requests)}" + "x" * (len(self.requests) % 2)
        params = SamplingParams(max_tokens=max_tokens, eos_token_ids=(END,))
        self.requests[name] = request = Request(name, list(prompt), params)
        self.delivered[name] = []
        self.engine.submit(request)
        return name

    def step(self):
        for finished in self.engine.step():
            assert finished.request_id not in self.ended, f"{finished.request_id} ended twice"
            self.ended[finished.request_id] = finished

    @property
    def living(self):
        return [rank_executor for rank_executor in self.rank_executors if not rank_executor.dead]

    def run(self, at):
        ranks = [rank for rank_executor in self.living for rank in rank_executor.channel.ranks]
        if ranks:
            ranks[at % len(ranks)].run()

    def deliver(self, at, *, word):
        if self.living:
            self.living[at % len(self.living)].deliver(word=word)

    def repeat(self, at):
        if self.living:
            self.living[at % len(self.living)].repeat(at // len(self.living))

    def kill(self, at, arrives):
        if self.living:
            self.living[at % len(self.living)].kill(arrives)

    def turn(self, *, words=True, records=True):
        """Advance everything once, and the clock with it; ``words``, ``records``: whether to deliver any."""
        self.now += 0.05
        for rank_executor in self.living:
            for rank in rank_executor.channel.ranks:
                rank.run()
            for word in (True,) * words + (False,) * records:
                rank_executor.deliver(word=word)
        self.step()

    # -- invariants -------------------------------------------------------------------------------------------------

    def finish(self, most=6000):
        turns = 0
        while self.engine.busy:
            self.turn()
            turns += 1
            assert turns < most, {name: one.state for name, one in self.engine.front.split_requests.items()}
        for _ in range(600):
            self.turn()
        self.check()

    def check(self):
        for name, request in self.requests.items():
            finished, complete = self.ended[name], expected(request)
            got = self.delivered[name]
            assert got == complete[: len(got)], name
            assert list(finished.token_ids) == complete[: len(finished.token_ids)], name
            if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == complete, f"{name} ended after {len(got)} of {len(complete)} tokens"
            assert finished.reason is not FinishReason.ERROR or finished.message
        for worker in self.engine.workers:
            if worker.up:
                scheduler = worker.scheduler
                assert scheduler.pool.free == scheduler.pool.size, f"{worker.name}: blocks are not free"
                assert sorted(scheduler._slots) == list(range(scheduler.layout.sizes.num_slots)), worker.name
                assert not worker.leaving, worker.name
                assert not scheduler.running
                assert not scheduler._in_flight._held
        for rank_executor in self.living:
            for rank in rank_executor.channel.ranks:
                assert not rank.handover.busy, f"{rank_executor.label}: something is under way"
                assert not rank.transfer._promises.open
                assert not rank.handover._arrived
                assert not rank.handover._outgoing
                assert not rank.handover._destinations
