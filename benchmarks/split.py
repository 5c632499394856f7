"""Time to the first token, and from it to the second: with a worker that does both, and with split.

A prompt of 480 tokens in chunks of 256 and in one, 24 tokens generated; each worker is a process of its own, as under
``hal run``, with half of the machine's cores (OMP_NUM_THREADS). The second token of a split comes of the decode worker:
between the two lie the hand-over and a step. Then the same beside three requests that decode all the while: the
newcomer's wait for its first token, and the longest wait of the three for a token meanwhile. Both ways are up, and get
their requests in turn. python benchmarks/split.py [requests]
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))

import hal_core.handover
import numpy as np
from hal_core import OutputRecord, Request
from run import versions

from hal.cli.run_options import Options, RankOptions, Sampling
from hal.cli.run_plan import Plan, Prompt, make_plan
from hal.cli.run_ranks import _setup
from hal.distributed.engine import open_engine
from hal.distributed.starting import RankStart
from hal.engine import Engine

PROMPT, GENERATED, OTHERS, LONG = 480, 24, 3, 480
Times = dict[str, list[float]]


@dataclass
class Way:
    """An engine with its workers, the time of each token, and the measurements: name to milliseconds."""

    split: tuple[int, int] | None
    chunk: int
    told: dict[str, list[float]] = field(default_factory=dict)
    found: Times = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        text = Path(__file__).read_text() + Path(hal_core.handover.__file__ or "").read_text()
        sampling = Sampling(temperature=0.0, top_p=1.0, max_tokens=GENERATED, min_tokens=GENERATED)
        ranks = RankOptions(split=self.split)
        options = Options(device="cpu", slots=4, blocks=160, chunk=self.chunk, ranks=ranks)
        plan = make_plan([Prompt(text[:800], sampling)], options)
        plan = replace(plan, sizes=replace(plan.sizes, num_slots=4, max_model_len=512), blocks=160)
        self.prompt, self.params = plan.tokenizer.encode(text)[:PROMPT], plan.requests[0].params
        self.engine = self._engine(plan, options)

    def _engine(self, plan: Plan, options: Options) -> Engine:
        return open_engine(
            _setup(plan, options),
            RankStart(options.ranks.ranks(), options.device),
            vocab_size=plan.config.vocab_size,
            split=self.split,
            chunk=self.chunk,
            on_record=self._take,
            note=print,
        )

    def _take(self, record: OutputRecord) -> None:
        now = time.perf_counter()
        for row in record.rows():
            self.told.setdefault(row.request_id, []).extend([now] * len(row.tokens))

    def _step(self) -> None:
        for ended in self.engine.step():
            assert not ended.message, ended.message

    def _submit(self, name: str, prompt: list[int], tokens: int) -> float:
        self.engine.submit(Request(name, prompt, replace(self.params, max_tokens=tokens, min_tokens=tokens)))
        return time.perf_counter()

    def _note(self, name: str, seconds: float) -> None:
        self.found.setdefault(name, []).append(1000 * seconds)

    def alone(self) -> None:
        """Measure one request alone."""
        self.number += 1
        begin = self._submit(name := f"r{self.number}", [self.number % 256, *self.prompt[1:]], GENERATED)
        while self.engine.busy:
            self._step()
        told = self.told[name]
        self._note("first token", told[0] - begin)
        self._note("first to second", told[1] - told[0])
        self._note("each later", (told[-1] - told[1]) / (len(told) - 2))

    def beside(self) -> None:
        """Measure one request beside three that decode."""
        self.number += 1
        others = [f"o{self.number}.{n}" for n in range(OTHERS)]
        for other in others:
            self._submit(other, self.prompt[:8], LONG)
        while not all(len(self.told.get(other, ())) > 4 for other in others):
            self._step()
        begin = self._submit(name := f"b{self.number}", [self.number % 256, *self.prompt[1:]], 2)
        while len(self.told.get(name, ())) < 2:
            self._step()
        first = self.told[name][0]
        for other in others:
            self.engine.abort(other)
        while self.engine.busy:
            self._step()
        self._note("first token, beside 3", first - begin)
        gaps = [
            after - before
            for other in others
            for before, after in pairwise(self.told[other])
            if after >= begin and before <= first
        ]
        self._note("longest wait of the 3", max(gaps))


def table(chunk: int, ways: dict[str, Way]) -> None:
    """A line for each thing that was measured, each way in a column."""
    print(f"chunk {chunk:20} " + "".join(f"{name:>26}" for name in ways))
    for name in next(iter(ways.values())).found:
        columns = []
        for way in ways.values():
            low, middle, high = np.percentile(way.found[name], (10, 50, 90))
            columns.append(f"{middle:9.1f} ({low:.1f} to {high:.1f})")
        print(f"  {name:24} " + "".join(f"{column:>26}" for column in columns), flush=True)


def main(count: int) -> None:
    """Print the tables."""
    print(versions())
    print(
        f"{os.cpu_count()} cores, {os.environ['OMP_NUM_THREADS']} threads each; ms, medians (10th to 90th percentile)"
    )
    print(f"of {count} requests each, {PROMPT} tokens of prompt")
    for chunk in (256, 512):
        ways = {"one worker": Way(None, chunk)}
        try:
            ways["split 1,1"] = Way((1, 1), chunk)
            for number in range(count + 2):
                for way in ways.values():
                    way.alone()
                    way.beside()
                    if number == 1:  # the first two were to warm up
                        way.found.clear()
            table(chunk, ways)
            for way in ways.values():
                way.engine.stop()
        finally:
            for way in ways.values():
                way.engine.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
