"""Cost of a proposal on the host: times of n-gram and suffix at 4,096 tokens of a request.

    python benchmarks/proposers.py [--tokens N] [--slots N]

A proposal is what ``propose`` does for a request with room for 5 drafts; a step is the proposal and, before it, taking
over one token. Texts: of a kind in which words recur as in prose (Zipf), of any token, of one token alone, and of a
period. Medians over rounds of processor time, in microseconds; the cost of a request's entry and end follows below.
Processor time is the time on a free core; beside busy neighbours elapsed time is longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from hal_core import AdmittedRequest, Request, SamplingParams, StateConfig, admit
from hal_core.slots.layout import lay_out

from hal.proposers import Fed, Proposer, Setup
from hal.proposers.ngram import NGram
from hal.proposers.suffix import SHARED_TOKENS, Suffix

VOCAB, ROOM, ROUNDS, OUTPUT = 32_000, 5, 30, 1_000
BOUNDS = {"n-gram": 20.0, "suffix, own": 50.0, "suffix, shared": 200.0}
"""Microseconds that a proposal may take."""
Draw = Callable[[int, int], np.ndarray]


def zipf(seed: int, count: int) -> np.ndarray:
    """Few tokens often, most of them seldom."""
    return np.random.default_rng(seed).zipf(1.2, count) % VOCAB


def uniform(seed: int, count: int) -> np.ndarray:
    """Any token, which seldom stood there before."""
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def same(seed: int, count: int) -> np.ndarray:
    """One token."""
    return np.full(count, seed % VOCAB)


def periodic(seed: int, count: int) -> np.ndarray:
    """The same 37 tokens over and over."""
    return np.tile(uniform(seed, 37), count // 37 + 1)[:count]


TEXTS: dict[str, Draw] = {"Zipf": zipf, "uniform": uniform, "same": same, "periodic": periodic}


def shared(setup: Setup, draw: Draw) -> Suffix:
    """A suffix proposer that holds as many outputs of other requests as fit."""
    proposer = Suffix(setup)
    while proposer.shared.tokens + OUTPUT < SHARED_TOKENS - 100:
        proposer.shared.enter(draw(1_000 + len(proposer.shared), OUTPUT).astype(np.int64))
    return proposer


def measure(proposer: Proposer, request: AdmittedRequest, draw: Draw, tokens: int, slots: int) -> tuple[float, float]:
    """Microseconds a request of a proposal, and of a step."""
    for slot in range(slots):
        proposer.enter(slot, request, draw(slot, tokens).astype(np.int64))
    room, proposals, steps = dict.fromkeys(range(slots), ROOM), [], []
    for round_ in range(ROUNDS):
        fed = Fed(range(slots), [draw(slot, tokens + ROUNDS)[tokens + round_ :][:1] for slot in range(slots)])
        begin = time.thread_time()
        proposer.observe(fed)
        middle = time.thread_time()
        proposer.propose(room)
        end = time.thread_time()
        proposals.append((end - middle) / slots * 1e6)
        steps.append((end - begin) / slots * 1e6)
    for slot in range(slots):
        proposer.leave(slot, finished=False)
    return statistics.median(proposals), statistics.median(steps)


def at_the_ends(setup: Setup, request: AdmittedRequest, tokens: int) -> None:
    """Print what entering and leaving cost."""
    for name, proposer in (("n-gram", NGram(setup)), ("suffix", shared(setup, zipf))):
        texts = [zipf(seed, tokens + OUTPUT).astype(np.int64) for seed in range(20)]
        enters, leaves = [], []
        for text in texts:
            begin = time.thread_time()
            proposer.enter(0, request, text[:tokens])
            enters.append((time.thread_time() - begin) * 1e3)
            proposer.observe(Fed([0], [text[tokens:]]))
            begin = time.thread_time()
            proposer.leave(0, finished=True)
            leaves.append((time.thread_time() - begin) * 1e3)
        tracemalloc.start()
        proposer.enter(0, request, texts[0][:tokens])
        prompt = tracemalloc.get_traced_memory()[0]
        proposer.observe(Fed([0], [texts[0][tokens:]]))
        output = tracemalloc.get_traced_memory()[0] - prompt
        tracemalloc.stop()
        print(
            f"{name}: entering with {tokens} tokens {statistics.median(enters):.2f} ms, leaving with an output of "
            f"{OUTPUT} {statistics.median(leaves):.2f} ms; {prompt / tokens:.0f} bytes a token of the prompt, "
            f"{output / OUTPUT:.0f} of the output"
        )


def main() -> None:
    """Print the table, with marks for values over their bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4_096)
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args()
    setup = Setup(ROOM, options.slots, options.tokens + OUTPUT, VOCAB)
    layout = lay_out(StateConfig(num_slots=1, max_model_len=setup.max_model_len))
    request = admit(Request("r", [1] * options.tokens, SamplingParams(max_tokens=OUTPUT)), layout)
    print(f"{'':16} {'text':10} {'a proposal':>11} {'a step':>9} {'bound':>7}")
    for name, bound in BOUNDS.items():
        for text, draw in TEXTS.items():
            made = {"n-gram": NGram, "suffix, own": Suffix}.get(name)
            proposer = made(setup) if made else shared(setup, draw)
            proposal, step = measure(proposer, request, draw, options.tokens, options.slots)
            print(
                f"{name:16} {text:10} {proposal:8.1f} us {step:6.1f} us {bound:4.0f} us{' over' * (proposal > bound)}"
            )
    at_the_ends(setup, request, options.tokens)


if __name__ == "__main__":
    main()
