"""Runs of the embedded checkpoint that must give the same tokens: on one rank, and on the ranks of a pool."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace

from hal_core import MemorySink, Request, SamplingParams, SlotStatus, StateConfig
from hal_engine.distributed.control_messages import Setup
from hal_engine.distributed.engine import engine_of_ranks
from hal_engine.distributed.rank_executor import RankExecutor
from hal_engine.engine import Engine
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hal_engine.proposers import Setup as ProposerSetup
from hal_engine.proposers import make_proposer
from hal_paddle_runner.loading import load_model
from hal_paddle_runner.runner import ModelRunner
from hal_paddle_runner.worker import Worker
from msgspec import structs

from hal import open_device
from tests.distributed.rank_work import be_a_rank

MARGIN, TOLERANCE, TOKENS = 1e-3, 1e-4, 16
GREEDY = ("def main(", "for i in range(", "if __name__ ==", "from collections import")
SEEDED = (("with open(", 6), ("from collections import", 8), ("if __name__ ==", 3))
DRAW = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
SIZES = StateConfig(3, 64, 16, max_logprobs=2, max_eos=1, max_stop_sequences=1, max_stop_length=1, max_bad_words=1)
AMPLE, SCARCE = 12, 4
"""Blocks of 16 tokens for three slots: as many as can be used, and so few that requests preempt one another."""
PATIENCE = 60.0


@functools.cache
def requests():
    """Greedy and seeded ones with penalties in turn, whose reference has clear margins."""
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, config)
    base = {"max_tokens": TOKENS, "eos_token_ids": config.eos_token_ids, "logprobs": 2}
    made = [Request(f"g{n}", tokenizer.encode(text), SamplingParams(**base)) for n, text in enumerate(GREEDY)]
    made += [
        Request(f"s{n}", tokenizer.encode(text), SamplingParams(**base, **DRAW, seed=seed))
        for n, (text, seed) in enumerate(SEEDED)
    ]
    made.append(structs.replace(made[1], request_id="p1", params=SamplingParams(**base, repetition_penalty=1.3)))
    return made


@dataclass
class Delivered:
    """The content of records: request to tokens, log-probabilities and their ids, each in order; and preempted
    requests."""

    tokens: dict = field(default_factory=lambda: defaultdict(list))
    logprobs: dict = field(default_factory=lambda: defaultdict(list))
    preempted: int = 0
    longest: int = 0  # most tokens in a row
    drafts: tuple = (0, 0, 0)  # fed, accepted, turns

    def take(self, record):
        for row in record.rows():
            self.preempted += row.status is SlotStatus.PREEMPTED
            if row.status is SlotStatus.TOKEN:
                self.longest = max(self.longest, len(row.tokens))
                assert row.position == len(self.tokens[row.request_id]), "a token was lost, or came twice"
                self.tokens[row.request_id] += row.tokens.tolist()
                if row.logprobs is not None:
                    self.logprobs[row.request_id] += row.logprobs[:, 0].tolist()


class WatchedRunner(ModelRunner):
    """Records how close each choice was to a different one."""

    def _write(self, tokens):
        self.least = min([getattr(self, "least", 1.0), *tokens.margins.tolist()])
        super()._write(tokens)


class Watched(Worker):
    runner_type = WatchedRunner


@functools.cache
def reference():
    """The tokens of one rank, whose margins are wide enough for the last bits of a sum not to matter."""
    return alone(Row())


def alone(row):
    """Return one rank's results of a row; as :func:`reference`, but for another proposer or acceptance rule."""
    delivered, sink, sizes = Delivered(), MemorySink(), row.sizes
    with open_device("cpu") as device:
        model = load_model(DEFAULT_CHECKPOINT)
        setup = ProposerSetup(
            sizes.max_draft_tokens,
            sizes.num_slots,
            sizes.max_model_len,
            model.config.vocab_size,
            model,
            rejection=row.rejection,
        )
        proposer = make_proposer(row.speculate, setup)
        worker = Watched(device, model, sizes, AMPLE, sink, proposer=proposer, rejection=row.rejection)
        engine = Engine(worker)
        for request in requests():
            engine.submit(request)
        for _ in engine.run():
            pass
    assert row.rejection or worker.runner.least >= MARGIN, "choose prompts with a wider margin"
    for record in sink.records:
        delivered.take(record)
    return delivered


class Pooled:
    """Ranks of a pool that serve an engine of this process; the pool outlives the engine."""

    def __init__(self, pool, how=()):
        self._pool, self._how = pool, how
        self.answers = {}
        self._thread = None

    def start(self, url):
        self._pool.begin(be_a_rank, url, *self._how, ranks=range(self._pool.size))
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self):
        for rank in range(self._pool.size):
            try:
                self.answers |= self._pool.finish([rank], PATIENCE)
            except Exception as error:  # noqa: BLE001 (it is the answer)
                self.answers[rank] = getattr(error, "errors", {}).get(rank, error)

    def ended(self):
        return "" if self._thread.is_alive() else f"the ranks have answered: {self.answers}"

    def end(self, patience):
        if self._how[:1] in (("killed",), ("stopped",)):
            self._pool.kill([self._how[1]])
        if self._thread is not None:
            self._thread.join(PATIENCE)


@dataclass(frozen=True)
class Row:
    """One division of the work."""

    tp: int = 1
    dp: int = 1
    chunk: int = 256
    blocks: int = AMPLE
    everywhere: bool = False
    check: bool = True
    timeout: float = 20.0
    sink: str = ""
    speculate: str = "none"
    device: str = "cpu"
    rejection: bool = False
    overlap: str = "auto"

    @property
    def sizes(self):
        return SIZES if self.speculate == "none" else replace(SIZES, max_draft_tokens=3)

    def setup(self, **more):
        fields = {
            "model": str(DEFAULT_CHECKPOINT),
            "device": self.device,
            "sizes": replace(self.sizes, vocab_size=read_config(DEFAULT_CHECKPOINT).vocab_size),
            "blocks": self.blocks,
            "tp": self.tp,
            "dp": self.dp,
            "timeout": self.timeout,
            "chunk": self.chunk,
            "sampling": "every-rank" if self.everywhere else "first",
            "check": self.check,
            "sink": self.sink,
            "speculate": self.speculate,
            "acceptance": "rejection" if self.rejection else "exact",
            "overlap": self.overlap,
        }
        return Setup(**(fields | more))


def engine_of(row, start, delivered, rank_executor=RankExecutor, restarts=0, **options):
    """An engine whose ranks come from ``start``, and its collected records. ``rank_executor``: makes the ranks'
    rank_executor.
    """
    return engine_of_ranks(
        row.setup(restart=restarts),
        lambda setup: rank_executor(setup, start()),
        on_record=delivered.take,
        **options,
    )


def run(row, pool, how=(), chosen=None):
    """Run a row on a pool, with all requests or the ``chosen`` ones. Return the records' content, and the ranks'
    answers."""
    pooled = Pooled(pool, how)
    return run_with(row, lambda: pooled, chosen), pooled.answers


def run_with(row, start, chosen=None, **options):
    """Run a row on the ranks that ``start`` gives. Return the records' content."""
    delivered = Delivered()
    return served(engine_of(row, start, delivered, **options), delivered, chosen)


def served(engine, delivered, chosen=None):
    """Run all requests, or the ``chosen`` ones, to their end and stop the engine. Return the records' content."""
    try:
        for request in chosen or requests():
            engine.submit(request)
        for _ in engine.run():
            pass
    except BaseException:
        engine.close()
        raise
    engine.stop()
    delivered.drafts = engine.drafts
    return delivered
