"""Time to the first token, and from it to the second, of a request alone: with a worker that does both, and with split.

A prompt of 480 tokens in chunks of 256 and in one, 24 tokens generated; each rank is a process of its own, as under
``hal run``. The second token of a split comes of the decode worker: between the two lie the hand-over and a step.
python benchmarks/split.py [requests]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from hal_core import OutputRecord, Request, SamplingParams, lay_out

from hal.cli.run_options import Options, RankOptions
from hal.cli.run_plan import make_plan
from hal.cli.run_ranks import _setup
from hal.cli.run_split import split_engine
from hal.distributed.crew import Crew
from hal.distributed.engine import RanksEngine
from hal.distributed.launch import PaddleLaunch
from hal.model import DEFAULT_CHECKPOINT

PROMPT, GENERATED = 480, 24


class Times:
    """When each token of the request that runs was told."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def take(self, record: OutputRecord) -> None:
        """Note the time of each token."""
        now = time.perf_counter()
        self.told += [now] * sum(len(row.tokens) for row in record.rows())


def measure(split: tuple[int, int] | None, chunk: int, count: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds to the first token, from it to the second, and between later ones, of each request."""
    text = Path(__file__).read_text() + Path(sys.modules["hal_core.handover"].__file__ or "").read_text()
    params, ranks = SamplingParams(max_tokens=GENERATED, min_tokens=GENERATED), RankOptions(split=split)
    options = Options("cpu", {}, DEFAULT_CHECKPOINT, "cpu", 4, 160, chunk, [], "none", 4, False, ranks=ranks)
    plan = make_plan([text[:800]], params, options)
    plan = replace(plan, sizes=replace(plan.sizes, num_slots=4, max_model_len=512), blocks=160)
    prompt = plan.tokenizer.encode(text)[:PROMPT]
    setup, times = _setup(plan, options), Times()
    if split is None:
        engine = RanksEngine(
            lambda: Crew(setup, PaddleLaunch(1)),
            lay_out(plan.sizes),
            plan.blocks,
            1,
            vocab_size=plan.config.vocab_size,
            chunk=chunk,
            on_record=times.take,
        )
    else:
        engine = split_engine(plan, options, setup, 300.0, times.take, print)
    first, second, later = [], [], []
    try:
        for number in range(count + 3):
            times.told.clear()
            begin = time.perf_counter()
            engine.submit(Request(f"r{number}", [number, *prompt[1:]], plan.requests[0].params))
            while engine.busy:
                for ended in engine.step():
                    assert not ended.message, ended.message
            if number >= 3:
                told = [1000 * (at - begin) for at in times.told]
                first.append(told[0])
                second.append(told[1] - told[0])
                later.append((told[-1] - told[1]) / (len(told) - 2))
        engine.stop()
    finally:
        engine.close()
    return first, second, later


def main(count: int) -> None:
    """Print the table."""
    for chunk in (256, 512):
        for name, split in (("one worker", None), ("split 1,1", (1, 1))):
            first, second, later = map(median, measure(split, chunk, count))
            print(
                f"chunk {chunk}, {name:10}: first token {first:6.1f} ms, from it to the second {second:6.1f} ms, "
                f"then {later:5.1f} ms each (medians of {count})",
                flush=True,
            )


if __name__ == "__main__":
    import hal_core.handover  # noqa: F401 (its text is a part of the prompt)

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
