"""Sampling on the first rank alone against on every rank: tokens a second of the main job on two ranks over gloo.

    python benchmarks/sampling.py [rounds]

The model is split over the ranks; 16 requests at temperature 0.7. The first way gathers the logits on one rank, the
other gives them to all, each of which samples; either way ``broadcast_tokens`` makes the ranks agree, on the same
tokens. The ways take turns; the same without drafts and with n-gram's, which verifies several rows a request.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from hal_conformance.ranks.processes import Rank, RankPool

SLOTS, TOKENS = 16, 48
STARTS = ("def read(", "class Node:\n", "import os\n", "for name in ", "if not ", "return [", "try:\n", "with open(")
NOISE = 0x5DEECE66D
"""What the other rank mixes into its seeds where it samples too, as ``hal run --sampling every-rank`` has it."""
Times = dict[tuple[str, bool], list[float]]


def measure(rank: Rank, rounds: int) -> Times:
    """Seconds of each run, by proposer and by whether every rank samples; run on both ranks alike."""
    from hal_core import Group, MemorySink
    from hal_core.devices import TensorRanks, open_groups

    import hal
    from hal.model import DEFAULT_CHECKPOINT
    from hal.model.llama import LlamaModel
    from hal.model.tokenizer import Tokenizer

    open_groups([(0, 1)])
    group = Group((0, 1), rank.rank)
    ranks, times, said = TensorRanks(group), Times(), set[Any]()
    with hal.open_device("cpu") as device:
        models = {each: LlamaModel.load(DEFAULT_CHECKPOINT, ranks=ranks, everywhere=each) for each in (False, True)}
        tokenizer = Tokenizer.load(DEFAULT_CHECKPOINT, models[False].config)
        prompts = [tokenizer.encode(text) for text in STARTS * (SLOTS // len(STARTS))]
        for round_ in range(rounds + 1):  # the first one warms up
            for name in ("none", "ngram"):
                for everywhere, model in models.items():
                    begin = time.perf_counter()
                    said.add(_serve(device, model, prompts, group, name, MemorySink(), everywhere=everywhere))
                    if round_:
                        times.setdefault((name, everywhere), []).append(time.perf_counter() - begin)
    assert len(said) == 1, "the ways gave different tokens"
    return times


def _serve(
    device: Any,  # noqa: ANN401 (hal is imported in the ranks)
    model: Any,  # noqa: ANN401
    prompts: list[list[int]],
    group: Any,  # noqa: ANN401
    name: str,
    sink: Any,  # noqa: ANN401
    *,
    everywhere: bool,
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    from hal_core import Request, SamplingParams, StateConfig

    from hal.engine import Engine
    from hal.proposers import Setup, make_proposer
    from hal.worker import Worker

    drafts = 0 if name == "none" else 3
    sizes = StateConfig(SLOTS, max(map(len, prompts)) + TOKENS, max_draft_tokens=drafts)
    setup = Setup(drafts, SLOTS, sizes.max_model_len, model.config.vocab_size, model)
    worker = Worker(
        device,
        model,
        sizes,
        SLOTS * sizes.max_blocks,
        sink,
        group=group,
        noise=NOISE if everywhere and not group.is_first else 0,
        proposer=make_proposer(name, setup) if group.is_first else None,
        shares_drafts=drafts > 0,
    )
    device.open_group(state=worker.state, group=group)
    engine = Engine(worker)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=TOKENS, min_tokens=TOKENS)
        engine.submit(Request(f"r{number}", prompt, params))
    return tuple(sorted((done.request_id, done.token_ids) for done in engine.run()))


def main(rounds: int) -> None:
    """Print the table."""
    with RankPool(2) as pool:
        times = pool.run(measure, rounds, timeout=600)[0]
    for (name, everywhere), seconds in times.items():
        rate = SLOTS * TOKENS / statistics.median(seconds)
        ratio = statistics.median(one / own for one, own in zip(times[name, False], seconds, strict=True))
        who = "every rank samples" if everywhere else "one rank samples"
        print(f"{name:6} {who:19} {rate:7.0f} tokens/s, {ratio:.2f} x one rank's")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
