"""The worker's step on two ranks, with recorded logits in place of the model; drawing and broadcasts are real.

    python plugins/cuda/proof/recorded_ranks.py record FILE        one rank, cpu device, Paddle's model: its logits
    python plugins/cuda/proof/recorded_ranks.py replay FILE cuda   two ranks, each with the recorded logits; on one
                                                                   GPU with one_gpu:opened in place of cuda

For a GPU whose Paddle cannot compute: the model runs elsewhere, and its logits, and the tokens drawn from them, are
recorded. The ranks of ``replay`` must then draw those tokens: with one sampling rank and with all ranks sampling
(rank 1 from noise of its own), each with the broadcast list of a plain step and that of a step that verifies n-gram
drafts. Without the broadcast rank 1 has other tokens. Its rows then differ from the recorded ones, which ends the run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hal_conformance.harness.subject import Recipe
from hal_conformance.opening import subject_of
from hal_conformance.ranks import work
from hal_conformance.ranks.processes import Rank, RankFailed, RankPool
from hal_core import BoundDevice, Group, MemorySink, OutputRecord, Request, SamplingParams, SlotStatus, StateConfig
from hal_core.runtime.policy import Policy
from hal_core.tickets import DONE
from hal_engine.engine import Engine
from hal_engine.model import DEFAULT_CHECKPOINT
from hal_engine.model.config import read_config
from hal_engine.model.tokenizer import Tokenizer
from hal_engine.proposers import Proposer, Setup, make_proposer
from hal_paddle_runner.batch import ModelBatch
from hal_paddle_runner.worker import Worker
from nccl_ranks import recipe_of

from hal import open_device

PAIR = ((0, 1),)
TIMEOUT, STARTING, ALL = 10.0, 120.0, 120.0
"""Seconds: for a collective; until the ranks are up; for one run."""
SIZES = StateConfig(4, 256, 16, max_logprobs=2, max_eos=1)
LISTS = {"plain": SIZES, "speculative": replace(SIZES, max_draft_tokens=3)}
BLOCKS, TOKENS = 64, 48
NOISE = 0x1E37_79B9_7F4A_7C15
PROMPTS = ("def main(", "for i in range(", "import os\nimport sys\nimport", "class Reader:\n    def __init__(self")
Array = np.ndarray[Any, Any]


def requests() -> list[Request]:
    """Return twelve requests for four slots: each prompt greedy, and at temperatures 0.7 and 1.0."""
    config = read_config(DEFAULT_CHECKPOINT)
    tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, config)
    base = {"max_tokens": TOKENS, "eos_token_ids": config.eos_token_ids, "logprobs": 2}
    draws: list[dict[str, float]] = [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0}]
    return [
        Request(f"{kind}-{at}", tokenizer.encode(text), SamplingParams(**base, **draw, seed=7 * at + kind))
        for kind, draw in enumerate(draws)
        for at, text in enumerate(PROMPTS)
    ]


@dataclass
class Run:
    """Results of a run: a digest of each forward's rows with its logits, and tokens and log-probabilities by
    request."""

    forwards: list[tuple[bytes, Array]] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    drafted: int = 0
    accepted: int = 0
    seconds: list[float] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)

    def take(self, record: OutputRecord) -> None:
        """Keep a record's tokens."""
        for row in record.rows():
            if row.status is SlotStatus.TOKEN:
                self.tokens[row.request_id] += row.tokens.tolist()
                if row.logprobs is not None:
                    self.logprobs[row.request_id] += row.logprobs[:, 0].tolist()


def digest(batch: ModelBatch) -> bytes:
    """Return a digest of the model's inputs."""
    sums = hashlib.sha256()
    for column in (batch.token_ids, batch.positions, batch.row_lengths, batch.context_lengths):
        sums.update(np.ascontiguousarray(column).tobytes())
    return sums.digest()


class Recording:
    """Paddle's model on the cpu; its logits are kept."""

    def __init__(self, run: Run) -> None:
        from hal_paddle_runner.loading import load_model

        self._model, self._run = load_model(DEFAULT_CHECKPOINT), run
        self.config = self._model.config
        self.allocate_cache = self._model.allocate_cache

    def forward(self, batch: ModelBatch) -> Array | None:
        """Return the model's logits, and keep them."""
        logits = self._model.forward(batch)
        assert logits is not None
        self._run.forwards.append((digest(batch), logits.copy()))
        return logits


class Recorded:
    """The recorded logits; None on a rank that must not have them."""

    def __init__(self, forwards: Sequence[tuple[bytes, Array]], *, samples: bool) -> None:
        self.config = read_config(DEFAULT_CHECKPOINT)
        self._forwards, self._samples = iter(forwards), samples

    def allocate_cache(self, blocks: int, block_size: int) -> None:
        """Return None: no model computes."""

    def forward(self, batch: ModelBatch) -> Array | None:
        """Return the next logits if this is the next batch."""
        wanted, logits = next(self._forwards)
        if digest(batch) != wanted:
            raise AssertionError("this rank's rows are not those of the recorded run: its tokens were others")
        return logits if self._samples else None


def proposer_of(sizes: StateConfig, vocab: int) -> Proposer | None:
    """Return n-gram drafts if the state has room for them."""
    if not sizes.max_draft_tokens:
        return None
    return make_proposer("ngram", Setup(sizes.max_draft_tokens, sizes.num_slots, sizes.max_model_len, vocab, None))


def drive(device: BoundDevice, worker: Worker, run: Run) -> None:
    """Run the requests through an engine of this process."""
    engine = Engine(worker)
    for request in requests():
        engine.submit(request)
    while engine.busy:
        began = time.perf_counter()
        engine.step()
        run.seconds.append(time.perf_counter() - began)
        assert worker.last is not None
        run.take(worker.last)
    run.drafted, run.accepted = worker.acceptance.drafted, worker.acceptance.accepted


def record(file: Path) -> int:
    """Run both lists on one rank and keep the results."""
    runs = {}
    for name, sizes in LISTS.items():
        run = runs[name] = Run()
        with open_device("cpu") as device:
            model = Recording(run)
            proposer = proposer_of(sizes, model.config.vocab_size)
            drive(device, Worker(device, model, sizes, BLOCKS, MemorySink(), proposer=proposer), run)
        summary = f"{run.accepted} of {run.drafted} drafts accepted"
        print(f"{name}: {sum(map(len, run.tokens.values()))} tokens in {len(run.forwards)} forwards, {summary}")
    same = runs["plain"].tokens == runs["speculative"].tokens
    file.write_bytes(pickle.dumps({name: replace(run, tokens=dict(run.tokens), logprobs=dict(run.logprobs))
                                   for name, run in runs.items()}))  # fmt: skip
    print(f"{file}: {file.stat().st_size >> 20} MiB; drafts {'changed no token' if same else 'CHANGED TOKENS'}")
    return 0 if same else 1


def replay_on(rank: Rank, recipe: Recipe, file: str, name: str, everywhere: bool, silent: bool) -> Run:
    """In a rank: replay the recorded run. ``silent``: ``broadcast_tokens`` has no effect, which the check must
    detect."""
    recorded: Run = pickle.loads(Path(file).read_bytes())[name]
    run, sizes, group = Run(), LISTS[name], Group(PAIR[0], rank.rank)
    no_broadcast = mock.patch.object(Policy, "broadcast_tokens", return_value=DONE)
    with work.opened(recipe) as device:
        model = Recorded(recorded.forwards, samples=everywhere or rank.rank == 0)
        worker = Worker(
            device,
            model,
            sizes,
            BLOCKS,
            MemorySink(),
            group=group,
            noise=NOISE * rank.rank if everywhere else 0,
            proposer=proposer_of(sizes, model.config.vocab_size) if rank.rank == 0 else None,
            shares_drafts=bool(sizes.max_draft_tokens),
        )
        run.collectives = work.spy_on(device)
        device.open_group(state=worker.state, group=group)
        run.collectives.clear()
        if silent:
            no_broadcast.start()
        try:
            drive(device, worker, run)
        finally:
            mock.patch.stopall()
    return replace(run, tokens=dict(run.tokens), logprobs=dict(run.logprobs))


def judge(recorded: Run, seen: Mapping[int, Run], speculative: bool) -> list[str]:
    """Return the faults of a replay."""
    wrong = [f"rank {rank} has other tokens" for rank, run in seen.items() if run.tokens != dict(recorded.tokens)]
    pairs = [
        (a, b) for name, one in recorded.logprobs.items() for a, b in zip(one, seen[0].logprobs[name], strict=True)
    ]
    if not pairs or max(abs(a - b) for a, b in pairs) > 1e-4:
        wrong.append("log-probabilities differ by more than 1e-4")
    steps = len(recorded.forwards)
    for rank, run in seen.items():
        slices, most = len(run.collectives), (2 if speculative else 1) * len(run.seconds)
        if not steps <= slices <= most:
            wrong.append(f"rank {rank} took part in {slices} broadcasts in {len(run.seconds)} steps")
    return wrong


def replay(file: Path, device: str) -> int:
    """Replay both lists with both ways to sample, and once without the broadcast; return 0 if each gave its expected
    result."""
    recipe, good = recipe_of(device), True
    support = subject_of(recipe).support
    if not support.ranks:
        print(f"no ranks of {device} can be started here: {support.why_not('several_ranks')}")
        return 1

    def environment(rank: int, endpoints: Sequence[str]) -> Mapping[str, str]:
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        return {"PYTHONPATH": paths} | dict(support.rank_environment(rank, endpoints))

    recorded: dict[str, Run] = pickle.loads(file.read_bytes())
    with RankPool(2, environment=environment) as pool:
        pool.run(work.join, recipe, PAIR, TIMEOUT, "recorded", timeout=STARTING)
        for name in LISTS:
            for everywhere in (False, True):
                seen = pool.run(replay_on, recipe, str(file), name, everywhere, False, timeout=ALL)
                wrong = judge(recorded[name], seen, name == "speculative")
                good = good and not wrong
                first = seen[0]
                print(
                    f"{name:12s} {'every rank samples' if everywhere else 'one rank samples':19s} "
                    f"{sum(map(len, first.tokens.values()))} tokens, {len(first.seconds)} steps, "
                    f"{len(first.collectives)} broadcasts of {sorted(set(first.collectives))} bytes, "
                    f"{first.accepted} of {first.drafted} drafts, "
                    f"step {1e3 * float(np.median(first.seconds)):.2f} ms: {'; '.join(wrong) or 'equal'}",
                    flush=True,
                )
        try:
            pool.run(replay_on, recipe, str(file), "plain", True, True, timeout=ALL)
            print("without the broadcast: NOT NOTICED")
            good = False
        except RankFailed as error:
            print(f"without the broadcast: rank(s) {sorted(error.errors)} end: {next(iter(error.errors.values()))}")
    print("well" if good else "NOT WELL")
    return 0 if good else 1


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    what, where, *rest = arguments
    return record(Path(where)) if what == "record" else replay(Path(where), *(rest or ["cuda"]))


if __name__ == "__main__":
    import recorded_ranks  # so that pickled classes are found in the ranks, too

    sys.exit(recorded_ranks.main(sys.argv[1:]))
