"""Requests whose controls are drawn: all that a request may ask for, some of them together."""

from __future__ import annotations

import numpy as np
from hal_core import Request, SamplingParams

CONTROLS = {
    "temperature": [0.0, 0.7, 1.3],
    "top_k": [0, 0, 1, 4, 40],
    "top_p": [1.0, 0.6, 0.95],
    "min_p": [0.0, 0.0, 0.05, 0.4],
    "repetition_penalty": [1.0, 1.0, 1.3, 0.8],
    "frequency_penalty": [0.0, 0.0, 0.5, -0.3],
    "presence_penalty": [0.0, 0.0, 0.7],
    "min_tokens": [0, 0, 5],
    "logprobs": [None, None, 0, 3],
}


def drawn_requests(count: int, vocab: int, longest: int, seed: int = 7) -> list[Request]:
    """So many, of prompts and answers that fit into ``longest`` tokens together."""
    rng, made = np.random.default_rng(seed), []
    for number in range(count):
        prompt = rng.integers(0, vocab, int(rng.integers(1, longest // 2))).tolist()
        params = {name: values[int(rng.integers(len(values)))] for name, values in CONTROLS.items()}
        stops = [
            tuple(rng.integers(0, vocab, int(rng.integers(1, 3))).tolist()) for _ in range(int(rng.integers(0, 3)))
        ]
        words = tuple(set(rng.integers(0, vocab, int(rng.integers(0, 4))).tolist()))
        ends = tuple(set(rng.integers(0, vocab, int(rng.integers(0, 3))).tolist()))
        params |= {"stop_sequences": tuple(stops), "bad_words": words, "eos_token_ids": ends}
        most = int(rng.integers(6, longest // 2))
        made.append(Request(f"d{number}", prompt, SamplingParams(max_tokens=most, seed=number, **params)))
    return made
