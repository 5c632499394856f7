"""Drawn schedules, which ``schedules.py`` runs: requests, reused names, aborts, a loss; and their tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hal_core import FinishReason, Request, SamplingParams, StateConfig
from hal_core.slots.admission import draw_seed
from hal_sim.mixing import mixed

VOCAB = 11


@dataclass(frozen=True)
class Arrival:
    """A request, and the turn of the loop from which it arrives, as soon as its name is free."""

    turn: int
    request: Request


@dataclass(frozen=True)
class Schedule:
    """Arrivals in order. ``aborts``: turn and name; ``loss``: the turn at which the second rank is gone, or None."""

    sizes: StateConfig
    blocks: int
    chunk: int
    arrivals: list[Arrival]
    aborts: list[tuple[int, str]]
    loss: int | None


def draw(number: int) -> Schedule:
    """Schedule number ``number``: few slots and blocks, so that requests wait, are preempted, and follow each other."""
    rng = random.Random(number)
    drafts = rng.choice([0, 0, 1, 3])
    sizes = StateConfig(rng.choice([1, 2, 3, 4, 4]), 24, block_size=4, max_draft_tokens=drafts, max_stop_length=2)
    arrivals, tokens = [], range(VOCAB)
    for _ in range(rng.randint(2, 8)):
        prompt = rng.choices(tokens, k=rng.randint(1, 10))
        most = rng.randint(1, min(14, 24 - len(prompt)))
        ends = tuple(rng.sample(tokens, rng.choice([0, 0, 1, 2])))
        stops = tuple(tuple(rng.choices(tokens, k=2)) for _ in range(rng.choice([0, 0, 1])))
        params = SamplingParams(max_tokens=most, min_tokens=rng.randint(0, min(2, most)), eos_token_ids=ends,
                                stop_sequences=stops, seed=rng.randrange(100))  # fmt: skip
        arrivals.append(Arrival(rng.randint(0, 10), Request(f"n{rng.randrange(3)}", prompt, params)))
    arrivals.sort(key=lambda arrival: arrival.turn)
    aborts = sorted((rng.randint(0, 20), f"n{rng.randrange(3)}") for _ in range(rng.choice([0, 1, 2, 4])))
    loss = rng.randint(2, 12) if rng.random() < 0.25 else None
    return Schedule(sizes, rng.randint(6, 8), rng.randint(1, 16), arrivals, aborts, loss)


def expected(request: Request, sizes: StateConfig) -> tuple[tuple[int, ...], FinishReason]:
    """Return all tokens of a request, and the reason of its end."""
    params, prompt = request.params, list(request.prompt)
    given = mixed(draw_seed(params.seed, request.request_id), prompt, params.max_tokens, VOCAB)
    for at in range(1, len(given) + 1):
        ends = given[at - 1] in params.eos_token_ids
        ends = ends or any(tuple(given[:at][-len(stop) :]) == stop for stop in params.stop_sequences if at >= len(stop))
        if ends and at >= params.min_tokens:
            return tuple(given[:at]), FinishReason.STOP
        if at == params.max_tokens or len(prompt) + at >= sizes.max_model_len:
            return tuple(given[:at]), FinishReason.LENGTH
    raise AssertionError("a request without an end")
